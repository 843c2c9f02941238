-- For how many µs the bucket is in quarantine. Begins it where the bucket is not this server's.
-- ARGV: -, -, '1' to end it at once.
local about = redis.call('HMGET', H, '\1r', '\1y', '\1e')
local left = quarantined(about[1], about[2], about[3])
if left > 0 and ARGV[3] == '1' then
  redis.call('HDEL', H, '\1y')
  left = 0
end
return left
