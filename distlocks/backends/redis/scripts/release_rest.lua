-- The last part of release.lua, behind claims.lua: everything else.
local min_hold = tonumber(ARGV[4])

-- Until when a claim acquired then cools down, if it does.
local function cooled(acquired)
  local at = tonumber(acquired) + min_hold
  if min_hold > 0 and at > now then return digits(at) end
end

local about = call('HMGET', H, '\1r', '\1y', '\1e')
local quarantine = quarantined(about[1], about[2], about[3])
local freed = H .. ':f'
local ours = 0
for i = 5, #ARGV, 3 do
  local k, mode, token = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local queue = has_queue(k)
  local s = look(k)
  local has, state = own_claim(k, s, owner)
  if queue and token == '' then take_out(k, owner) end
  if not has and mode == 'E' and s.v then
    -- Expired and not taken by anybody else, or freed by an earlier release.
    local _, stop = string.find(s.v, '\n', 50, true)
    if s.mode == '' and sub(s.v, 50, stop - 1) == owner then
      has, state = sub(s.v, 17, 32), sub(s.v, 49, 49)
    end
  end
  if has and token ~= '' and has ~= token then has = nil end
  if has and state == 'C' or state == 'F' then
    if has then ours = ours + 1 end
  elseif has then
    ours = ours + 1
    local acquired = state == 'E' and mode ~= 'E' and sub(call('HGET', H .. ':i:' .. k, owner), 17, 32)
      or (s.v and sub(s.v, 33, 48)) or now_s
    local until_then = state == 'E' and token ~= '' and cooled(acquired)
    if not until_then then
      if mode == 'E' then
        s.mode, s.ends = '', nil
        if state == 'E' and token ~= '' and not queue then
          redis.pcall('HSET', H, k, sub(s.v, 1, 48) .. 'F' .. sub(s.v, 50))
        else
          call('HDEL', H, k)
          s.v = nil
        end
      else
        remove(k, s, owner)
      end
      if token ~= '' then
        redis.pcall('ZADD', freed, now_s, owner .. k)
        call('ZREMRANGEBYSCORE', freed, '-inf', string.format('%.0f', now - REMEMBERED))
        call('PEXPIRE', freed, 60000)
      end
    elseif mode == 'E' then
      call('HSET', H, k, until_then .. sub(s.v, 17, 48) .. 'C' .. sub(s.v, 50))
      s.ends = tonumber(until_then)
    else
      put(k, s, mode, owner, tonumber(until_then), token, acquired, 'C',
        sub(call('HGET', H .. ':i:' .. k, owner), 34))
    end
  elseif quarantine ~= 0 or call('ZSCORE', freed, owner .. k)
    or s.v and sub(s.v, -#owner - 1) == '\n' .. owner then
    -- Nobody has been let in since the bucket was lost: it was ours to the end.
    ours = ours + 1
  end
  -- Also if it had ended before: nobody may have looked since.
  if queue and quarantine == 0 then advance(k, s) end
end
return ours
