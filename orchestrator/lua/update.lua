#!lua
-- Puts another request in force for the tokens from here on. Its owner, whoever that is, learns of it by its next commit, which
-- the config version refuses.
--
-- KEYS[1]  state hash
-- KEYS[2]  token string, uint32 LE at 4 * position
-- ARGV[1]  config version of the request that is to be replaced
-- ARGV[2]  that request, since a session may have been made anew under this id
-- ARGV[3]  the new request, opaque
-- returns  {1 (replaced) | 2 (an earlier attempt of this call had succeeded), config version, length at which it came into force},
--          or {'lost' | 'finished' | 'changed', fence, epoch, length}
local fence, epoch, length, status, request, version, since =
  unpack(redis.call('HMGET', KEYS[1], 'fence', 'epoch', 'length', 'status', 'request', 'config_version', 'config_length'))
if not fence then return {'lost', 0, 0, 0} end
fence, epoch, length, version = tonumber(fence), tonumber(epoch), tonumber(length), tonumber(version or 0)
if redis.call('STRLEN', KEYS[2]) ~= length * 4 then return {'lost', fence, epoch, length} end

local base = tonumber(ARGV[1])
if version == base + 1 and request == ARGV[3] then return {2, version, tonumber(since)} end
if status ~= 'running' then return {'finished', fence, epoch, length} end
if version ~= base or request ~= ARGV[2] then return {'changed', fence, epoch, length} end
-- By two: a round of the next epoch may be at the workers already, and no answer to it must pass for one under this request.
redis.call('HSET', KEYS[1], 'request', ARGV[3], 'config_version', base + 1, 'config_length', length, 'epoch', epoch + 2)
return {1, base + 1, length}
