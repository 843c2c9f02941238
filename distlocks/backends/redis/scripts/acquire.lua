-- Grant all claims or none; tell who is in the way; give who waits a place in the queue.
-- Keeps: tokens of the bucket strictly grow; a key is granted only if its record says that it is
-- free, or reserved for the asker, and nobody who goes with what is there has waited for longer.
-- ARGV: run id, longest ttl, mailbox, owner id, hold, how long the asker has waited ('' if it is
-- not going to wait), who it is; then key, mode and limit of each claim. Durations are in µs.
local owner, hold, waited, who = ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[7]

local function next_token(last)
  last = tonumber(last or 0)
  if last >= now then return string.format('%.0f', last + 1) end
  return now_s
end

-- One exclusive claim on a key that is free, and nobody waits: nearly always.
if #ARGV == 10 and ARGV[9] == 'E' then
  local k = ARGV[8]
  local m = redis.call('HMGET', H, '\1r', '\1y', '\1t', k, '\1q' .. k)
  local v = m[4]
  if not m[5] and quarantined(m[1], m[2]) == 0 then
    local state = v and string.sub(v, 49, 49)
    if not v or state == 'F' or (state ~= 'S' and string.sub(v, 1, 16) <= now_s) then
      local token = next_token(m[3])
      redis.call('HSET', H, '\1t', token, k,
        digits(now + hold) .. token .. now_s .. 'E' .. owner .. '\n' .. who)
      local grant = 'G' .. now_s .. token
      local gone = {}
      if state == 'E' then gone[1] = {k, v} end
      if not v then
        -- A record more: what others have left behind goes, so that there are never many.
        local some = redis.call('HRANDFIELD', H, -2, 'WITHVALUES')
        local long_ago = digits(now - REMEMBERED)
        for i = 1, 4, 2 do
          local name, was = some[i], some[i + 1]
          if string.byte(name) ~= 1 and string.sub(was, 1, 16) < long_ago then
            local left = string.sub(was, 49, 49)
            if left ~= 'S' then
              if redis.call('HDEL', H, name) == 1 and left == 'E' then
                gone[#gone + 1] = {name, was}
              end
            end
          end
        end
      end
      if #gone == 0 then return {ok = grant} end
      return {grant, gone}
    end
  end
end
