-- Take all keys for the asker, or none; answer with the value that this node puts on them.
-- Keeps: a key is taken only if its record says that it is free; the value is above every token
-- that this node has put on the keys or has forgotten, and is the proposal if that is.
-- ARGV: -, -, owner id, number of the try, hold, proposal, how far that may be ahead of this
-- node's clock, who it is; then the keys. Durations are in µs.
local owner, try, hold, proposal = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local left = silent()
if left > 0 then return {'Q', now_s, left} end
if proposal > now + tonumber(ARGV[7]) then return {'S', now_s} end

local value = math.max(proposal, tonumber(call('HGET', H, '\1t') or '0') + 1)
local records, ours = {}, true
for i = 9, #ARGV do
  local v = call('HGET', H, ARGV[i])
  local mine = false
  if is_live(v) then
    local has, its_try = whose(v)
    -- Another try of the same asker, if it is not a later one that has overtaken this.
    mine = has == owner and tonumber(its_try) <= tonumber(try) and sub(v, 49, 49) == 'E'
    if not mine then return {'D', now_s, fields(ARGV[i], v)} end
  end
  ours = ours and mine
  if v then value = math.max(value, tonumber(sub(v, 17, 32)) + (mine and 0 or 1)) end
  records[i] = v
end
if ours then value = tonumber(sub(records[9], 17, 32)) end

-- The same on every node: the time of asking.
local since = ours and sub(records[9], 33, 48) or digits(proposal)
local gone = {}
local added = false
for i = 9, #ARGV do
  local k, v = ARGV[i], records[i]
  if v and sub(v, 49, 49) == 'E' and sub(v, 1, 16) <= now_s then gone[#gone + 1] = fields(k, v) end
  added = added or not v
  call('HSET', H, k,
    digits(now + hold) .. digits(value) .. since .. 'E' .. owner .. '\t' .. try .. '\n' .. ARGV[8])
end
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
return {'G', now_s, digits(value), since, gone}
