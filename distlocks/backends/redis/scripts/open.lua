-- Begin an epoch: from now on this server grants, to who names this epoch, and vouches for what it
-- has granted since.
-- Keeps: each attempt to open takes effect once at most (its nonce is used up), not after a later
-- one (whose nonce has replaced it) nor in another incarnation, and never goes back to an earlier epoch; tokens are higher
-- than those of the other store.
-- ARGV: -, -, the epoch with its 'e', nonce, the highest token so far.
-- Answers 'O', 'N' if the nonce is another, or the epoch that has been here already.
local about = redis.call('HMGET', H, '\1n', '\1e', '\1t')
local vouching = incarnation()
if about[1] ~= ARGV[4] .. vouching then return 'N' end
if about[2] and tonumber(string.sub(about[2], 2)) >= tonumber(string.sub(ARGV[3], 2)) then
  return about[2]
end
-- All leases from before have ended. What several had is in keys of its own.
local cursor = '0'
repeat
  local page = redis.call('HSCAN', H, cursor, 'COUNT', 1000)
  cursor = page[1]
  for i = 1, #page[2], 2 do
    local k = page[2][i]
    if string.byte(k) ~= 1 and string.sub(page[2][i + 1], 49, 49) == 'S' then
      redis.call('DEL', H .. ':s:' .. k, H .. ':i:' .. k)
    end
  end
until cursor == '0'
local token = ARGV[5]
if about[3] and about[3] > token then token = about[3] end
redis.call('UNLINK', H)
redis.call('HSET', H, '\1e', ARGV[3], '\1t', token, '\1r', vouching)
return 'O'
