-- The other half of acquire.lua, behind claims.lua: everything else.
local about = call('HMGET', H, '\1r', '\1y', '\1t', '\1e')
local quarantine = quarantined(about[1], about[2], about[4])
if quarantine < 0 then return {'D', ARGV[8], -1, 0, 'A', now_s, {}, {}} end
local wanted, refused, first_come = {}, nil, true
for i = 8, #ARGV, 3 do
  local c = {k = ARGV[i], mode = ARGV[i + 1], limit = tonumber(ARGV[i + 2]), s = look(ARGV[i])}
  c.token, c.state = own_claim(c.k, c.s, owner)
  c.queue = has_queue(c.k)
  wanted[#wanted + 1] = c
end
if quarantine > 0 then
  refused = wanted[1]
else
  for _, c in ipairs(wanted) do
    if c.state ~= 'E' and c.state ~= 'R' then
      local turn = true
      if c.queue then turn = advance(c.k, c.s, owner, c) end
      local fits = goes(c.s, c.mode, c.limit)
      if not fits or turn == false then
        refused, first_come = c, not fits
        break
      end
    end
  end
end

if refused then
  for _, c in ipairs(wanted) do
    -- What was reserved for it, and its place in other queues, is for the next.
    local left = false
    if c.state == 'R' then
      remove(c.k, c.s, owner)
      left = true
    end
    if c.queue and (c ~= refused or waited == '') then
      left = take_out(c.k, owner) or left
    end
    if left and quarantine == 0 then advance(c.k, c.s) end
  end
  local k, place = refused.k, -1
  if waited ~= '' then
    place = join(k, refused.mode, refused.limit, refused.queue)
  end
  local s, left = refused.s, 0
  if quarantine > 0 then
    left = quarantine
  elseif s.mode == refused.mode and s.mode == 'P' then
    left = s.soonest - now
  elseif s.ends then
    left = s.ends - now
  end
  return {'D', k, place, left, quarantine > 0 and 'Q' or (first_come and '' or 'B'), now_s,
    told(k, s, 100), expired}
end

local grant, last, told_now = 'G' .. now_s, about[3], false
for _, c in ipairs(wanted) do
  local token, acquired = c.token, now_s
  if c.state == 'E' then
    -- Asked again because the answer was lost.
    if c.s.mode == 'E' then
      acquired = sub(c.s.v, 33, 48)
    else
      acquired = sub(call('HGET', H .. ':i:' .. c.k, owner), 17, 32)
    end
    if not told_now then grant = 'G' .. acquired end
  else
    token = next_token(last)
    last = token
    note_taken_over(c.k, c.s)
  end
  told_now = true
  put(c.k, c.s, c.mode, owner, now + hold, token, acquired, 'E', who)
  grant = grant .. token
  if c.queue then
    take_out(c.k, owner)
    -- Who comes next may go with us; and an empty queue is forgotten.
    advance(c.k, c.s)
  end
end
if last then call('HSET', H, '\1t', last) end
return {grant, {}, expired}
