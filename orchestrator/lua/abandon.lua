#!lua flags=allow-oom
-- Lets a running session expire sooner, unless it is taken over before. Allowed on a full server: it leads to less data.
--
-- KEYS[1]  state hash
-- KEYS[2]  token string, uint32 LE at 4 * position
-- ARGV[1]  fence of the caller
-- ARGV[2]  claim of the caller
-- ARGV[3]  milliseconds until the session expires
-- returns  1 (it will), 2 (there is no session, or it is finished), or {'fenced', fence, epoch, length}
local fence, claim, epoch, length, status =
  unpack(redis.call('HMGET', KEYS[1], 'fence', 'claim', 'epoch', 'length', 'status'))
if not fence then return 2 end
if tonumber(fence) ~= tonumber(ARGV[1]) or claim ~= ARGV[2] then
  return {'fenced', tonumber(fence), tonumber(epoch), tonumber(length)}
end
if status ~= 'running' then return 2 end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
