-- For how many µs this node does not vote. Begins it where its memory is not this server's.
-- Keeps: tokens from before the quarantine stay below those after it, also when it is ended early.
-- ARGV: -, -, '1' to end it at once, how far tokens may have been ahead of this node's clock in µs.
local left = silent()
if left > 0 and ARGV[3] == '1' then
  call('HDEL', H, '\1y')
  local token = digits(now + ARGV[4])
  if token > (call('HGET', H, '\1t') or '') then call('HSET', H, '\1t', token) end
  left = 0
end
return left
