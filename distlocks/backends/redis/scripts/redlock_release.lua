-- End claims of one owner. Keeps: what another owner has is not touched, nor what a later try of
-- the same owner has; the token stays on the key; it cools down until its minimum hold has passed.
-- ARGV: -, -, owner id, number of the try ('' for any), token and when acquired ('' for any), minimum
-- hold; then the keys. µs.
-- Answers a letter for each key: 1 it was the owner's, now or by an earlier release, or nobody has
-- been let in since this node has lost its memory; else 0.
local owner, try, token, since, min_hold = ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local is_silent = silent() > 0
local answers = {}
for i = 8, #ARGV do
  local k, answer = ARGV[i], is_silent and '1' or '0'
  local v = call('HGET', H, k)
  local has, its_try
  if v then has, its_try = whose(v) end
  if has == owner and (try == '' or try == its_try)
    and (token == '' or is_of(v, owner, token, since)) then
    answer = '1'
    if sub(v, 49, 49) == 'E' then
      local at = tonumber(sub(v, 33, 48)) + min_hold
      if min_hold > 0 and at > now then
        call('HSET', H, k, digits(at) .. sub(v, 17, 48) .. 'C' .. sub(v, 50))
      else
        call('HSET', H, k, sub(v, 1, 48) .. 'F' .. sub(v, 50))
      end
    end
  end
  answers[#answers + 1] = answer
end
return table.concat(answers)
