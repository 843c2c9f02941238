-- Make claims last longer. Keeps: a claim that has ended, or is another's, is never brought back.
-- ARGV: -, -; then key, owner id, ttl and minimum hold of each; µs.
-- Answers a letter for each: 1 extended, 0 lost, B while this node does not vote.
local is_silent = silent() > 0
local answers = {}
for i = 3, #ARGV, 4 do
  local k, owner, answer = ARGV[i], ARGV[i + 1], '0'
  local v = call('HGET', H, k)
  if is_silent then
    answer = 'B'
  elseif is_live(v) and sub(v, 49, 49) == 'E' and whose(v) == owner then
    local at = math.max(now + ARGV[i + 2], tonumber(sub(v, 33, 48)) + ARGV[i + 3])
    if tonumber(ARGV[i + 3]) == 0 then at = now + ARGV[i + 2] end
    call('HSET', H, k, digits(at) .. sub(v, 17))
    answer = '1'
  end
  answers[#answers + 1] = answer
end
return table.concat(answers)
