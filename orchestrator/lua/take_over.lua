#!lua
-- Gives a running session to a new owner with the next fence; the old owner's commits fail from here on.
-- A finished session has nothing to own: it is returned as it is.
--
-- KEYS[1]  state hash
-- KEYS[2]  token string, uint32 LE at 4 * position
-- ARGV[1]  claim: random bytes that name this ownership, the same on a retry
-- ARGV[2]  owner, for people who look at the hash
-- ARGV[3]  milliseconds until the session expires
-- returns  {fence, epoch, length, prompt_length, status, fingerprint, request, finish or nil, tokens, owner, config_version,
--          config_length, claim, config_tag or nil}, or
--          {'lost', fence, epoch, length}
local fence, claim, epoch, length, status =
  unpack(redis.call('HMGET', KEYS[1], 'fence', 'claim', 'epoch', 'length', 'status'))
if not fence then return {'lost', 0, 0, 0} end
if redis.call('STRLEN', KEYS[2]) ~= tonumber(length) * 4 then
  return {'lost', tonumber(fence), tonumber(epoch), tonumber(length)}
end
if status == 'running' and claim ~= ARGV[1] then
  redis.call('HINCRBY', KEYS[1], 'fence', 1)
  redis.call('HSET', KEYS[1], 'claim', ARGV[1], 'owner', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
local state = redis.call('HMGET', KEYS[1], 'fence', 'epoch', 'length', 'prompt_length', 'status', 'fingerprint',
  'request', 'finish')
state[9] = redis.call('GET', KEYS[2])
state[10], state[11], state[12], state[13], state[14] =
  unpack(redis.call('HMGET', KEYS[1], 'owner', 'config_version', 'config_length', 'claim', 'config_tag'))
return state
