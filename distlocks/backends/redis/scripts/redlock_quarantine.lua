-- For how many µs this node does not vote. Begins it where its memory is not this server's.
-- Keeps: tokens from before the quarantine stay below those after it, also when it is ended early.
-- ARGV: -, -, '1' to end it at once, how far tokens may have been ahead of this node's clock in µs.
local left = silent(call('HMGET', H, '\1r', '\1y', '\1t'))
if left > 0 and ARGV[3] == '1' then
  local lost, floor = unpack(call('HMGET', H, '\1y', '\1t'))
  call('HDEL', H, '\1y')
  -- What it remembers of later tokens stays.
  if floor == digits(tonumber(lost) + ARGV[2]) then
    call('HSET', H, '\1t', digits(now + ARGV[4]))
  end
  left = 0
end
return left
