#!lua
-- Makes the tokens of one round real, if the caller still owns the session, nothing else has been committed, and the request
-- is the one that they were drawn for.
--
-- KEYS[1]  state hash
-- KEYS[2]  token string, uint32 LE at 4 * position
-- ARGV[1]  fence of the caller
-- ARGV[2]  claim of the caller
-- ARGV[3]  epoch before this commit
-- ARGV[4]  length before this commit, in tokens
-- ARGV[5]  new tokens, at least one
-- ARGV[6]  milliseconds until the session expires
-- ARGV[7]  config version that the tokens were drawn under
-- ARGV[8]  tag of that config
-- returns  1 (committed), 2 (an earlier attempt of this commit had succeeded), or
--          {'lost' | 'fenced' | 'changed' | 'conflict', fence, epoch, length}
local fence, claim, epoch, length, status, version, tag =
  unpack(redis.call('HMGET', KEYS[1], 'fence', 'claim', 'epoch', 'length', 'status', 'config_version', 'config_tag'))
if not fence then return {'lost', 0, 0, 0} end
fence, epoch, length = tonumber(fence), tonumber(epoch), tonumber(length)
if fence ~= tonumber(ARGV[1]) or claim ~= ARGV[2] then return {'fenced', fence, epoch, length} end
-- A server that evicts can take either key alone; SETRANGE would then pad with zeros, which are tokens.
if redis.call('STRLEN', KEYS[2]) ~= length * 4 then return {'lost', fence, epoch, length} end

local base_epoch, base_length = tonumber(ARGV[3]), tonumber(ARGV[4])
-- A session from before there were versions has none, and one whose config is its first has no tag.
if tonumber(version or 0) ~= tonumber(ARGV[7]) or (tag or '') ~= ARGV[8] then
  -- Each change raises the epoch by two. Another config without it is of a server that went back in time.
  if epoch < base_epoch + 2 or length < base_length then return {'conflict', fence, epoch, length} end
  -- A write, since only what follows one waits for those who have to hold it: what is told here has to last.
  redis.call('HSET', KEYS[1], 'fence', fence)
  return {'changed', fence, epoch, length}
end
local new_length = base_length + #ARGV[5] / 4
local outcome = 1
if epoch == base_epoch + 1 and length == new_length
  and redis.call('GETRANGE', KEYS[2], base_length * 4, -1) == ARGV[5] then
  outcome = 2
elseif epoch ~= base_epoch or length ~= base_length or status ~= 'running' then
  return {'conflict', fence, epoch, length}
else
  redis.call('SETRANGE', KEYS[2], base_length * 4, ARGV[5])
  redis.call('HSET', KEYS[1], 'epoch', base_epoch + 1, 'length', new_length)
end
if status == 'running' then
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
  redis.call('PEXPIRE', KEYS[2], ARGV[6])
end
return outcome
