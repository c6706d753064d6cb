#!lua flags=allow-oom
-- Removes a session, if the caller owns it. Allowed on a full server: this is how memory comes back.
--
-- KEYS[1]  state hash
-- KEYS[2]  token string, uint32 LE at 4 * position
-- ARGV[1]  fence of the caller
-- ARGV[2]  claim of the caller
-- returns  1 (removed), 2 (there was no session any more), or {'fenced', fence, epoch, length}
local fence, claim, epoch, length = unpack(redis.call('HMGET', KEYS[1], 'fence', 'claim', 'epoch', 'length'))
if not fence then return 2 end
if tonumber(fence) ~= tonumber(ARGV[1]) or claim ~= ARGV[2] then
  return {'fenced', tonumber(fence), tonumber(epoch), tonumber(length)}
end
redis.call('UNLINK', KEYS[1], KEYS[2])
return 1
