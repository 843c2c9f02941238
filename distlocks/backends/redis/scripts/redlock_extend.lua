-- Make claims last longer. Keeps: a claim that has ended, or is another's, is never brought back.
-- ARGV: -, -; then key, owner id, token, ttl and minimum hold of each; µs.
-- Answers a letter for each: 1 extended, 0 lost, B while this node does not vote.
local votes = silent() == 0
local answers = {}
for i = 3, #ARGV, 5 do
  local k, owner, answer = ARGV[i], ARGV[i + 1], '0'
  local v = call('HGET', H, k)
  if not votes then
    answer = 'B'
  elseif is_live(v) and sub(v, 49, 49) == 'E' and is_of(v, owner, ARGV[i + 2]) then
    local at, min_hold = now + ARGV[i + 3], tonumber(ARGV[i + 4])
    if min_hold > 0 then at = math.max(at, tonumber(sub(v, 33, 48)) + min_hold) end
    call('HSET', H, k, digits(at) .. sub(v, 17))
    answer = '1'
  end
  answers[#answers + 1] = answer
end
return table.concat(answers)
