-- End claims of one owner; how many of them were its own, now or by an earlier release.
-- Keeps: what another owner has is not touched; a key cools down until its minimum hold has passed;
-- who waits gets it before whoever comes later.
-- ARGV: -, -, owner id, minimum hold; then key, mode and fencing token of each claim.
-- No token: whatever the owner has or waits for ends without a trace.
--
-- This part: one exclusive claim without a minimum hold and with nobody waiting. The record stays,
-- so that a release sent twice finds its first. It needs no time of day.
local owner = ARGV[3]
local one = ARGV[6] == 'E' and not ARGV[8] and ARGV[7] ~= '' and ARGV[4] == '0'
local m

if one then
  local k = ARGV[5]
  m = redis.call('HMGET', KEYS[1], k, '\1q' .. k, '\1r', '\1y', '\1e')
  local v = m[1]
  one = v and string.sub(v, 17, 32) == ARGV[7]
    and string.sub(v, 49, 50 + #owner) == 'E' .. owner .. '\n'
  if one and not m[2] then
    local written = redis.pcall('HSET', KEYS[1], k, string.sub(v, 1, 48) .. 'F' .. string.sub(v, 50))
    -- A server that is full takes nothing new, not even this; deleting is allowed.
    if type(written) == 'table' then redis.call('HDEL', KEYS[1], k) end
    return 1
  end
end
