#!lua flags=allow-oom
-- Reads a session at one instant. Without `no-writes`, so that a replica, which may lag, refuses to answer.
--
-- KEYS[1]  state hash
-- KEYS[2]  token string, uint32 LE at 4 * position
-- returns  {fence, epoch, length, prompt_length, status, fingerprint, request, finish or nil, tokens, owner, config_version,
--          config_length, claim, config_tag or nil}, or
--          {'lost', fence, epoch, length}, or 0 (there is no such session)
local state = redis.call('HMGET', KEYS[1], 'fence', 'epoch', 'length', 'prompt_length', 'status', 'fingerprint',
  'request', 'finish')
if not state[1] then return 0 end
if redis.call('STRLEN', KEYS[2]) ~= tonumber(state[3]) * 4 then
  return {'lost', tonumber(state[1]), tonumber(state[2]), tonumber(state[3])}
end
state[9] = redis.call('GET', KEYS[2])
state[10], state[11], state[12], state[13], state[14] =
  unpack(redis.call('HMGET', KEYS[1], 'owner', 'config_version', 'config_length', 'claim', 'config_tag'))
return state
