#!lua
-- Puts another request in force for the tokens from here on. Its owner, whoever that is, learns of it by its next commit, which
-- the config version refuses.
--
-- KEYS[1]  state hash
-- KEYS[2]  token string, uint32 LE at 4 * position
-- ARGV[1]  config version of the request that is to be replaced
-- ARGV[2]  that request, since a session may have been made anew under this id
-- ARGV[3]  the new request, opaque
-- ARGV[4]  tag: random bytes that name this change, since after a failover another one may get its number
-- returns  {1 (replaced, by this attempt of the call or an earlier one) | 2 (it is in force already), config version, length at which
--          it came into force},
--          or {'lost' | 'finished' | 'changed' | 'early', fence, epoch, length}
local fence, epoch, length, status, request, version, since, prompt_length, tag = unpack(redis.call('HMGET', KEYS[1], 'fence', 'epoch',
  'length', 'status', 'request', 'config_version', 'config_length', 'prompt_length', 'config_tag'))
if not fence then return {'lost', 0, 0, 0} end
fence, epoch, length, version = tonumber(fence), tonumber(epoch), tonumber(length), tonumber(version or 0)
if redis.call('STRLEN', KEYS[2]) ~= length * 4 then return {'lost', fence, epoch, length} end
since = tonumber(since or prompt_length)

local base = tonumber(ARGV[1])
local in_force = version == base + 1 and request == ARGV[3]
if in_force or (status == 'running' and version == base and request == ARGV[2] and request == ARGV[3]) then
  -- A write, since only what follows one waits for those who have to hold it: what is told here has to last.
  redis.call('HSET', KEYS[1], 'fence', fence)
  local outcome = 2
  if tag == ARGV[4] then outcome = 1 end
  return {outcome, version, since}
end
if status ~= 'running' then return {'finished', fence, epoch, length} end
if version ~= base or request ~= ARGV[2] then return {'changed', fence, epoch, length} end
-- Each change costs the rounds under way. One for each commit at most, or who repeats them fast keeps the request from going on.
if version > 0 and length == since then return {'early', fence, epoch, length} end
-- By two: a round of the next epoch may be at the workers already, and no answer to it must pass for one under this request.
redis.call('HSET', KEYS[1], 'request', ARGV[3], 'config_version', base + 1, 'config_length', length, 'config_tag', ARGV[4],
  'epoch', epoch + 2)
return {1, base + 1, length}
