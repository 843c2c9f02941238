-- Grant all claims or none; tell who is in the way; give who waits a place in the queue.
-- Keeps: tokens of the bucket strictly grow; a key is granted only if its record says that it is
-- free, or reserved for the asker, and nobody who goes with what is there has waited for longer.
-- ARGV: -, -, mailbox, owner id, hold, how long the asker has waited ('' if it is not going to
-- wait), who it is; then key, mode and limit of each claim. Durations are in µs.
--
-- This half: one exclusive claim on a key that is free, that was reserved for the asker, or that
-- somebody else has exclusively, which is what nearly always comes.
local owner, hold, waited, who = ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[7]

local function next_token(last)
  if last and last >= now_s then return string.format('%.0f', last + 1) end
  return now_s
end

-- Give the asker a place in the queue, or say that it is still there; how many are before it.
local function join(k, mode, limit, has_flag)
  local queue, waiters = H .. ':q:' .. k, H .. ':w:' .. k
  redis.call('ZADD', queue, 'NX', string.format('%.0f', now - waited), owner)
  local place = redis.call('ZRANK', queue, owner)
  while place > 0 do
    -- The dead before it do not count: whoever comes first looks after the holder.
    local first = redis.call('ZRANGE', queue, 0, 0)[1]
    local w = redis.call('HGET', waiters, first)
    if w and string.sub(w, 1, 16) >= now_s then break end
    redis.call('ZREM', queue, first)
    redis.call('HDEL', waiters, first)
    place = place - 1
  end
  local alive = now + (place < 2 and ALIVE_NEXT or ALIVE)
  redis.call('HSET', waiters, owner,
    digits(alive) .. mode .. string.format('%05d', limit) .. ARGV[3] .. '\n' .. who)
  if not has_flag or place == 0 then redis.call('HSET', H, '\1q' .. k, '1') end
  redis.call('PEXPIRE', queue, 60000)
  redis.call('PEXPIRE', waiters, 60000)
  return place
end

if ARGV[9] == 'E' and not ARGV[11] then
  local k = ARGV[8]
  local m = redis.call('HMGET', H, '\1r', '\1y', '\1t', k, '\1q' .. k, '\1e')
  local v = m[4]
  if quarantined(m[1], m[2], m[6]) == 0 then
    local state = v and string.sub(v, 49, 49)
    local free = not v or state == 'F' or (state ~= 'S' and string.sub(v, 1, 16) <= now_s)
    local mine = v and string.sub(v, 50, 50 + #owner) == owner .. '\n'
    if free and not m[5] or (not free and state == 'R' and mine) then
      local token = next_token(m[3])
      -- Who handed it over keeps its line: its release may come again.
      local former = state == 'R' and string.match(v, '\n[^\n]*(\n[^\n]*)$', 50) or ''
      redis.call('HSET', H, '\1t', token, k,
        digits(now + hold) .. token .. now_s .. 'E' .. owner .. '\n' .. who .. former)
      local gone
      if state == 'E' then gone = {{k, v}} end
      if not v then
        -- A record more: what others have left behind goes, so that there are never many.
        local some = redis.call('HRANDFIELD', H, -2, 'WITHVALUES')
        local long_ago = digits(now - REMEMBERED)
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
    if not free and state ~= 'S' and not mine then
      local place = -1
      if waited ~= '' then
        place = join(k, 'E', 0, m[5])
      elseif m[5] then
        redis.call('ZREM', H .. ':q:' .. k, owner)
        redis.call('HDEL', H .. ':w:' .. k, owner)
      end
      local expiry = string.sub(v, 1, 16)
      local _, stop = string.find(v, '\n', 50, true)
      return {'D', k, place, expiry - now, '', now_s, {{k, string.sub(v, 50, stop - 1), expiry,
        string.sub(v, 17, 32), string.sub(v, 33, 48), state, 'E', string.sub(v, stop + 1)}}, {}}
    end
  end
end
