-- Stands before every other script. All of a bucket's locks live in one hash, KEYS[1], with the
-- record by which its loss is noticed; nothing beside it decides who has a lock.
--
-- ARGV[1] of every script: '' ordinarily, '-' for no guard, 'e' and a number for the epoch in which
-- the asker believes the bucket to be open (see open.lua). ARGV[2]: the longest ttl in µs.
--
-- Fields of the hash: "\1r" the replication id of the server that vouches for it (a server has a new
-- one whenever it starts or is promoted), "\1y" when it was found to have lost its memory, "\1t" the last fencing token, "\1q<key>" there is a queue, "\1e" and
-- "\1n" see open.lua; and per key a record:
--   digits 1-16 expiry, 17-32 fencing token, 33-48 when acquired (all in µs), then the state:
--   E held exclusively, R reserved for the first who waited, C cooling down, F freed (whatever
--   its expiry says),
--   S several claims: then a letter for their mode, and their number; digits 1-16 are the latest
--     expiry among them. They are members of "<hash>:s:<key>" by expiry, with details in
--     "<hash>:i:<key>": digits 1-16 fencing token, 17-32 when acquired, then E, R or C.
--   After E, R, C, F: the owner id, a newline, who it is; if the owner before handed it over, a
--   newline and that one's id.
-- Modes: E exclusive, S shared, P permit, I intention.
-- The queue of a key is "<hash>:q:<key>" by time of asking, with details in "<hash>:w:<key>":
--   digits 1-16 until when the waiter counts as alive, the mode, 5 digits of limit, the mailbox, a
--   newline, who it is.
local H = KEYS[1]
-- A waiter must confirm within so many µs that it takes what was reserved for it.
local RESERVED = 500000
-- Ended claims are remembered for so long, so that a release sent twice finds its first.
local REMEMBERED = 10000000
-- Those next in the queue look after each other more often than those further back.
local ALIVE_NEXT, ALIVE = 5500000, 10500000
local NOBODY = '0000000000000000'

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local now_s = string.format('%d%06d', clock[1], clock[2])

local function digits(number)
  return string.format('%016.0f', number)
end

local function incarnation()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
end

-- µs until the bucket may be used again for grants and extensions, 0 in ordinary times. A server
-- that has not written the bucket itself may have lost grants: nothing is granted until the last
-- of them has ended. Where an epoch is named, -1 for another epoch or another server than those
-- for which the bucket has been opened: that does not pass by itself.
local function quarantined(known, lost, epoch)
  if ARGV[1] == '-' then return 0 end
  local longest = tonumber(ARGV[2])
  local vouching = incarnation()
  if ARGV[1] ~= '' then return epoch == ARGV[1] and known == vouching and 0 or -1 end
  if known ~= vouching then
    redis.call('HSET', H, '\1r', vouching, '\1y', now_s)
    return longest
  end
  if not lost then return 0 end
  -- Each asker by its own longest ttl: others may have had longer leases, or shorter ones.
  local left = tonumber(lost) + longest - now
  if left > longest then
    -- The server's clock has been set back.
    redis.call('HSET', H, '\1y', now_s)
    return longest
  end
  return math.max(left, 0)
end
