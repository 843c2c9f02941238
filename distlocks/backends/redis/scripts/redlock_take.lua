-- Take all keys for the asker, or none; answer with the value that this node puts on them.
-- Keeps: a key is taken only if its record says that it is free; the value is above every token
-- that this node has put on the keys or has forgotten, and is the proposal if that is.
-- ARGV: -, -, owner id, number of the try, hold, proposal, how far that may be ahead of this
-- node's clock, who it is; then the keys. Durations are in µs.
local owner, try, hold, proposal = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local found = call('HMGET', H, '\1r', '\1y', '\1t', unpack(ARGV, 9))
local left = quarantined(found[1], found[2])
if left > 0 then return {'Q', now_s, left} end
if proposal > now + tonumber(ARGV[7]) then return {'S', now_s} end

local value = math.max(proposal, floor_of(found[2], found[3]) + 1)
-- Whether this is sent again, or another try of the same asker.
local ours, gone, added = true, {}, false
for i = 9, #ARGV do
  local v = found[i - 5]
  local mine = false
  if v then
    local has, its_try = whose(v)
    -- A later one may have overtaken this, which may also have ended before it arrived again.
    local is_late = has == owner and tonumber(its_try) >= tonumber(try)
    if is_live(v) then
      mine = has == owner and tonumber(its_try) <= tonumber(try) and sub(v, 49, 49) == 'E'
      is_late = not mine
    end
    if is_late then return {'D', now_s, fields(ARGV[i], v)} end
    if not mine and sub(v, 49, 49) == 'E' then gone[#gone + 1] = fields(ARGV[i], v) end
  end
  ours = ours and mine
  added = added or not v
  if v then value = math.max(value, tonumber(sub(v, 17, 32)) + 1) end
end
-- The same on every node: the time of asking.
local since = digits(proposal)
if ours then value, since = tonumber(sub(found[4], 17, 32)), sub(found[4], 33, 48) end
local token = digits(value)
local record = digits(now + hold) .. token .. since .. 'E' .. owner .. '\t' .. try .. '\n' .. ARGV[8]
for i = 9, #ARGV do call('HSET', H, ARGV[i], record) end
if added then
  -- A record more: what others have left behind goes, so that there are never many.
  local some = call('HRANDFIELD', H, -2, 'WITHVALUES')
  local long_ago = digits(now - REMEMBERED)
  for i = 1, 4, 2 do
    if string.byte(some[i]) ~= 1 and sub(some[i + 1], 1, 16) < long_ago
      and call('HEXISTS', H, some[i]) == 1 then
      forget(some[i], some[i + 1])
    end
  end
end
return {'G', now_s, token, since, gone}
