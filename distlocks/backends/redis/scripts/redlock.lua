-- Behind common.lua, before every script of a Redlock node: one of several servers, of which a
-- majority decides. Each key has an exclusive record or none. In it, the owner id is followed by a
-- tab and the number of its owner's try: what is still under way of an earlier try touches nothing
-- of a later one. "\1t" is the highest token among the records that are gone.
local call, sub = redis.call, string.sub

-- Above every token of which nothing is known here any more, from the fields "\1y" and "\1t". Tokens
-- are ahead of this node's clock by less than what the quarantine is longer than a lease.
local function floor_of(lost, forgotten)
  local floor = tonumber(forgotten or 0)
  if lost then floor = math.max(floor, tonumber(lost) + ARGV[2]) end
  return floor
end

-- µs until this node may vote again, 0 in ordinary times.
local function silent()
  return quarantined(unpack(call('HMGET', H, '\1r', '\1y')))
end

-- The owner id, the number of its try, and who it is.
local function whose(v)
  return string.match(v, '^([^\t]*)\t(%d+)\n(.*)$', 50)
end

local function is_live(v)
  return v and sub(v, 49, 49) ~= 'F' and sub(v, 1, 16) > now_s
end

-- Whether a record is of this grant: a majority has just its token. On a node that has another, which
-- is rare, the key stays taken until its lease ends.
local function is_of(v, owner, token)
  return sub(v, 50, 50 + #owner) == owner .. '\t' and sub(v, 17, 32) == digits(token)
end

-- Keeps: the token of a record that is gone is not put on its key again.
local function forget(k, v)
  local token = sub(v, 17, 32)
  if token > (call('HGET', H, '\1t') or '') then call('HSET', H, '\1t', token) end
  call('HDEL', H, k)
end

-- What is told of a holder: key, owner id, expiry, token, when acquired, state, mode, who it is.
local function fields(k, v)
  local owner, _, who = whose(v)
  return {k, owner, sub(v, 1, 16), sub(v, 17, 32), sub(v, 33, 48), sub(v, 49, 49), 'E', who}
end
