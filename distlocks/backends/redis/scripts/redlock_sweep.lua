-- Clear what is past its expiry, in one page. Keeps: what is live is not touched.
-- ARGV: -, -, cursor, about how many, '1' to change nothing.
local dry = ARGV[5] == '1'
silent()
local page = call('HSCAN', H, ARGV[3], 'COUNT', ARGV[4])
local examined, deleted, expired = 0, 0, {}
local long_ago = digits(now - REMEMBERED)
for i = 1, #page[2], 2 do
  local k, v = page[2][i], page[2][i + 1]
  if sub(k, 1, 1) ~= '\1' then
    examined = examined + 1
    if sub(v, 49, 49) == 'E' and sub(v, 1, 16) <= now_s then
      expired[#expired + 1] = fields(k, v)
      if not dry then forget(k, v) end
    elseif sub(v, 49, 49) ~= 'E' and sub(v, 1, 16) < long_ago then
      deleted = deleted + 1
      if not dry then forget(k, v) end
    end
  end
end
return {page[1], examined, deleted, now_s, expired}
