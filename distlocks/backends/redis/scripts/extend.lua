-- Make claims last longer. Keeps: a claim that has ended, or is another's, is never brought back.
-- ARGV: -, -; then key, owner id, fencing token, ttl, minimum hold and mode of each.
-- Answers a letter for each: 1 extended, 0 lost; of all, B while in quarantine, A in another epoch.
local about = redis.call('HMGET', H, '\1r', '\1y', '\1e')
local quarantine = quarantined(about[1], about[2], about[3])
local answers = {}

local function until_when(acquired, ttl, min_hold)
  local at = now + ttl
  if min_hold > 0 and tonumber(acquired) + min_hold > at then at = tonumber(acquired) + min_hold end
  return digits(at)
end

for i = 3, #ARGV, 6 do
  local k, owner, token, mode = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 5]
  local ttl, min_hold = tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4])
  local answer = '0'
  if quarantine ~= 0 then
    answer = quarantine < 0 and 'A' or 'B'
  elseif mode == 'E' then
    local v = redis.call('HGET', H, k)
    if v and string.sub(v, 17, 32) == token and string.sub(v, 1, 16) > now_s
      and string.sub(v, 49, 50 + #owner) == 'E' .. owner .. '\n' then
      redis.call('HSET', H, k,
        until_when(string.sub(v, 33, 48), ttl, min_hold) .. string.sub(v, 17))
      answer = '1'
    end
  else
    local z = H .. ':s:' .. k
    local expiry = redis.call('ZSCORE', z, owner)
    local was = redis.call('HGET', H .. ':i:' .. k, owner)
    if expiry and was and tonumber(expiry) > now and string.sub(was, 1, 16) == token
      and string.sub(was, 33, 33) == 'E' then
      redis.call('ZADD', z, until_when(string.sub(was, 17, 32), ttl, min_hold), owner)
      local v = redis.call('HGET', H, k)
      local last = redis.call('ZRANGE', z, -1, -1, 'WITHSCORES')
      redis.call('HSET', H, k, digits(last[2]) .. string.sub(v, 17))
      answer = '1'
    end
  end
  answers[#answers + 1] = answer
end
return table.concat(answers)
