#!lua flags=allow-oom
-- Marks a session as finished and lets it expire sooner. Allowed on a full server, since it leads to less data there.
--
-- KEYS[1]  state hash
-- KEYS[2]  token string, uint32 LE at 4 * position
-- ARGV[1]  fence of the caller
-- ARGV[2]  claim of the caller
-- ARGV[3]  epoch of the last commit
-- ARGV[4]  result, opaque
-- ARGV[5]  milliseconds until the session expires
-- ARGV[6]  config version of the last commit
-- ARGV[7]  tag of that config
-- returns  1 (finished), 2 (an earlier attempt of this call had succeeded), or
--          {'lost' | 'fenced' | 'changed' | 'conflict', fence, epoch, length}
local fence, claim, epoch, length, status, finish, version, tag = unpack(redis.call('HMGET', KEYS[1], 'fence', 'claim', 'epoch',
  'length', 'status', 'finish', 'config_version', 'config_tag'))
if not fence then return {'lost', 0, 0, 0} end
fence, epoch, length = tonumber(fence), tonumber(epoch), tonumber(length)
if fence ~= tonumber(ARGV[1]) or claim ~= ARGV[2] then return {'fenced', fence, epoch, length} end
if redis.call('STRLEN', KEYS[2]) ~= length * 4 then return {'lost', fence, epoch, length} end
-- As in commit.
if tonumber(version or 0) ~= tonumber(ARGV[6]) or (tag or '') ~= ARGV[7] then
  if epoch < tonumber(ARGV[3]) + 2 then return {'conflict', fence, epoch, length} end
  redis.call('HSET', KEYS[1], 'fence', fence)
  return {'changed', fence, epoch, length}
end
if epoch ~= tonumber(ARGV[3]) then return {'conflict', fence, epoch, length} end
if status ~= 'running' then
  if finish == ARGV[4] then return 2 end
  return {'conflict', fence, epoch, length}
end
redis.call('HSET', KEYS[1], 'status', 'finished', 'finish', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return 1
