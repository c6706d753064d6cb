#!lua
-- Stores a new session: the prompt, the request, and its first owner with fence 1 and epoch 0.
--
-- KEYS[1]  state hash
-- KEYS[2]  token string, uint32 LE at 4 * position
-- ARGV[1]  claim: random bytes that name this ownership, the same on a retry
-- ARGV[2]  owner, for people who look at the hash
-- ARGV[3]  request fingerprint
-- ARGV[4]  request, opaque
-- ARGV[5]  prompt tokens
-- ARGV[6]  milliseconds until the session expires
-- returns  1 (created), 2 (an earlier attempt of this very call had created it), or
--          {'exists', fence, epoch, length, fingerprint}
local fence, claim, epoch, length, fingerprint =
  unpack(redis.call('HMGET', KEYS[1], 'fence', 'claim', 'epoch', 'length', 'fingerprint'))
if fence then
  -- Its caller knows only now that it is the owner, but somebody may have changed the session already, and raised the epoch.
  if claim == ARGV[1] and fence == '1' then return 2 end
  return {'exists', tonumber(fence), tonumber(epoch), tonumber(length), fingerprint}
end
-- SET replaces what an evicted session may have left under this key.
redis.call('SET', KEYS[2], ARGV[5], 'PX', ARGV[6])
redis.call('HSET', KEYS[1], 'fence', 1, 'claim', ARGV[1], 'owner', ARGV[2], 'epoch', 0,
  'length', #ARGV[5] / 4, 'prompt_length', #ARGV[5] / 4, 'fingerprint', ARGV[3], 'request', ARGV[4],
  'config_version', 0, 'config_length', #ARGV[5] / 4, 'status', 'running')
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return 1
