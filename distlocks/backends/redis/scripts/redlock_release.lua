-- End claims of one owner. Keeps: what another owner has is not touched, nor what a later try of
-- the same owner has; the token stays on the key; it cools down until its minimum hold has passed.
-- ARGV: -, -, owner id, number of the try ('' for any), token ('' for any), minimum hold in µs; then
-- the keys.
-- Answers a letter for each key: 1 it was the owner's, now or by an earlier release, or nobody has
-- been let in since this node has lost its memory; else 0.
local owner, try, token, min_hold = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local answers = {}
for i = 7, #ARGV do
  local k, answer = ARGV[i], '1'
  local v = call('HGET', H, k)
  local prefix = owner .. '\t' .. (try == '' and '' or try .. '\n')
  if not v or sub(v, 50, 49 + #prefix) ~= prefix
    or token ~= '' and not is_of(v, owner, token) then
    answer = silent() > 0 and '1' or '0'
  else
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
