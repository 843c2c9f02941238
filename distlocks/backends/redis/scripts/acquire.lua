-- Grant all claims or none; tell who is in the way; give who waits a place in the queue.
-- Keeps: tokens of the bucket strictly grow; a key is granted only if its record says that it is
-- free, or reserved for the asker, and nobody who goes with what is there has waited for longer.
-- ARGV: run id, longest ttl, mailbox, owner id, hold, how long the asker has waited ('' if it is
-- not going to wait), who it is; then key, mode and limit of each claim. Durations are in µs.
--
-- This half: one exclusive claim on a key that is free, with nobody waiting, which is what nearly
-- always comes. It stands before everything that only the rest needs. For records see common.lua.
local owner, hold, waited, who = ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[7]
if ARGV[1] == '' then ARGV[1] = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') end

if ARGV[9] == 'E' and not ARGV[11] then
  local H, clock, k = KEYS[1], redis.call('TIME'), ARGV[8]
  local m = redis.call('HMGET', H, '\1r', '\1y', '\1t', k, '\1q' .. k)
  local v = m[4]
  if not m[5] and (m[1] == ARGV[1] and not m[2] or ARGV[1] == '-') then
    local now_s = string.format('%d%06d', clock[1], clock[2])
    local state = v and string.sub(v, 49, 49)
    if not v or state == 'F' or (state ~= 'S' and string.sub(v, 1, 16) <= now_s) then
      local token = now_s
      if m[3] and m[3] >= now_s then token = string.format('%.0f', m[3] + 1) end
      local us = clock[2] + hold
      redis.call('HSET', H, '\1t', token, k,
        string.format('%d%06d', clock[1] + math.floor(us / 1000000), us % 1000000)
          .. token .. now_s .. 'E' .. owner .. '\n' .. who)
      local gone
      if state == 'E' then gone = {{k, v}} end
      if not v then
        -- A record more: what others have left behind goes, so that there are never many.
        local some = redis.call('HRANDFIELD', H, -2, 'WITHVALUES')
        local long_ago = (clock[1] - 10) .. '000000'
        for i = 1, 4, 2 do
          local name, was = some[i], some[i + 1]
          local left = string.sub(was, 49, 49)
          if string.byte(name) ~= 1 and left ~= 'S' and string.sub(was, 1, 16) < long_ago
            and redis.call('HDEL', H, name) == 1 and left == 'E' then
            gone = gone or {}
            gone[#gone + 1] = {name, was}
          end
        end
      end
      if not gone then return {ok = 'G' .. now_s .. token} end
      return {'G' .. now_s .. token, gone}
    end
  end
end
