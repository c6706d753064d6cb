#!lua
-- Does nothing. The server refuses it wherever it would refuse a commit: as a replica, when full, while loading.
--
-- returns  1
return 1
