-- End claims of one owner; how many of them were its own, now or by an earlier release.
-- Keeps: what another owner has is not touched; a key cools down until its minimum hold has passed;
-- who waits gets it before whoever comes later.
-- ARGV: run id, longest ttl, owner id, minimum hold; then key, mode and fencing token of each claim.
-- No token: whatever the owner has or waits for ends without a trace.
local owner, min_hold = ARGV[3], tonumber(ARGV[4])

-- The time at which a claim acquired then may be freed, if that is not over.
local function cooled(acquired)
  local at = tonumber(acquired) + min_hold
  if min_hold > 0 and at > now then return digits(at) end
end

if #ARGV == 7 and ARGV[6] == 'E' and ARGV[7] ~= '' then
  local k = ARGV[5]
  local m = redis.call('HMGET', H, k, '\1q' .. k)
  local v = m[1]
  local mine = ARGV[7] .. string.sub(v or '', 33, 48)
  if v and string.sub(v, 17, 49 + #owner + 1) == mine .. 'E' .. owner .. '\n' then
    local until_then = cooled(string.sub(v, 33, 48))
    if until_then or not m[2] then
      local freed = (until_then or now_s) .. mine .. (until_then and 'C' or 'F') .. string.sub(v, 50)
      local written = redis.pcall('HSET', H, k, freed)
      -- A server that is full takes nothing new, not even this; deleting is allowed.
      if type(written) == 'table' and written.err then redis.call('HDEL', H, k) end
      return 1
    end
  end
end
