-- Put the agreed token on the keys; '1' if they are this try's and have no higher one, else '0'.
-- Keeps: a node that has given a key to another, or has forgotten it, counts for nobody's token.
-- ARGV: -, -, owner id, number of the try, token; then the keys.
local token = digits(ARGV[5])
if silent() > 0 then return '0' end
for i = 6, #ARGV do
  local v = call('HGET', H, ARGV[i])
  if not is_live(v) or sub(v, 49, 49) ~= 'E' then return '0' end
  local has, its_try = whose(v)
  if has ~= ARGV[3] or its_try ~= ARGV[4] or sub(v, 17, 32) > token then return '0' end
end
for i = 6, #ARGV do
  local v = call('HGET', H, ARGV[i])
  call('HSET', H, ARGV[i], sub(v, 1, 16) .. token .. sub(v, 33))
end
return '1'
