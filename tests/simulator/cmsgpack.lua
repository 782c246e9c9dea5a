-- What Redis gives its scripts beside Lua itself, as far as popgate's use it: cmsgpack (MessagePack) and struct.pack.
local byte, char, sub, concat = string.byte, string.char, string.sub, table.concat
local floor, frexp, ldexp, huge = math.floor, math.frexp, math.ldexp, math.huge

local function big_endian(n, bytes)
  local out = {}
  for i = bytes, 1, -1 do
    out[i] = char(n % 256)
    n = floor(n / 256)
  end
  return concat(out)
end

-- ---------------------------------------------------------------- writing

local function packed_double(n)
  local sign, exponent, fraction = 0, 0, 0
  if n < 0 or (n == 0 and 1 / n < 0) then sign, n = 128, -n end
  if n ~= n or n == huge then
    exponent, fraction = 2047, n ~= n and 2 ^ 51 or 0
  elseif n ~= 0 then
    local m, e = frexp(n)
    exponent, fraction = e + 1022, (m * 2 - 1) * 2 ^ 52
  end
  return '\203' .. char(sign + floor(exponent / 16)) .. char((exponent % 16) * 16 + floor(fraction / 2 ^ 48))
    .. big_endian(fraction % 2 ^ 48, 6)
end

local function packed_number(n)
  if n ~= floor(n) or n == huge or n == -huge then return packed_double(n) end
  if n >= 0 then
    if n < 128 then return char(n) end
    if n < 2 ^ 8 then return '\204' .. char(n) end
    if n < 2 ^ 16 then return '\205' .. big_endian(n, 2) end
    if n < 2 ^ 32 then return '\206' .. big_endian(n, 4) end
    return '\207' .. big_endian(n, 8)
  end
  if n >= -32 then return char(256 + n) end
  if n >= -2 ^ 7 then return '\208' .. char(256 + n) end
  if n >= -2 ^ 15 then return '\209' .. big_endian(2 ^ 16 + n, 2) end
  if n >= -2 ^ 31 then return '\210' .. big_endian(2 ^ 32 + n, 4) end
  local high = floor(n / 2 ^ 32)
  return '\211' .. big_endian(2 ^ 32 + high, 4) .. big_endian(n - high * 2 ^ 32, 4)
end

local function head(n, short, short_max, two, four)
  if n <= short_max then return char(short + n) end
  if n < 2 ^ 16 then return two .. big_endian(n, 2) end
  return four .. big_endian(n, 4)
end

local function packed_string(s)
  local n = #s
  if n > 31 and n < 256 then return '\217' .. char(n) .. s end
  return head(n, 160, 31, '\218', '\219') .. s
end

local packed

local function packed_table(t)
  local count = 0
  for _ in pairs(t) do count = count + 1 end
  local out = {}
  if count == #t then
    out[1] = head(count, 144, 15, '\220', '\221')
    for i = 1, count do out[i + 1] = packed(t[i]) end
    return concat(out)
  end
  out[1] = head(count, 128, 15, '\222', '\223')
  for key, value in pairs(t) do out[#out + 1] = packed(key) .. packed(value) end
  return concat(out)
end

function packed(value)
  local kind = type(value)
  if kind == 'string' then return packed_string(value) end
  if kind == 'number' then return packed_number(value) end
  if kind == 'table' then return packed_table(value) end
  if kind == 'boolean' then return value and '\195' or '\194' end
  if kind == 'nil' then return '\192' end
  error('cmsgpack does not pack ' .. kind)
end

-- ---------------------------------------------------------------- reading

local function number_at(s, at, bytes)
  local n = 0
  for i = at, at + bytes - 1 do n = n * 256 + byte(s, i) end
  return n
end

local function double_at(s, at)
  local first, second = byte(s, at, at + 1)
  local sign = first >= 128 and -1 or 1
  local exponent = (first % 128) * 16 + floor(second / 16)
  local fraction = (second % 16) * 2 ^ 48 + number_at(s, at + 2, 6)
  if exponent == 2047 then return fraction == 0 and sign * huge or 0 / 0 end
  if exponent == 0 then return sign * ldexp(fraction, -1074) end
  return sign * ldexp(fraction + 2 ^ 52, exponent - 1075)
end

local unpacked

local function array_at(s, at, count)
  local t = {}
  for i = 1, count do t[i], at = unpacked(s, at) end
  return t, at
end

local function map_at(s, at, count)
  local t = {}
  for _ = 1, count do
    local key, value
    key, at = unpacked(s, at)
    value, at = unpacked(s, at)
    t[key] = value
  end
  return t, at
end

local UNSIGNED = { [204] = 1, [205] = 2, [206] = 4, [207] = 8 }
local SIGNED = { [208] = 1, [209] = 2, [210] = 4 }
local STRINGS = { [217] = 1, [218] = 2, [219] = 4, [196] = 1, [197] = 2, [198] = 4 }
local ARRAYS, MAPS = { [220] = 2, [221] = 4 }, { [222] = 2, [223] = 4 }

function unpacked(s, at)
  local code = byte(s, at)
  if not code then error('cmsgpack: missing bytes in input') end
  at = at + 1
  if code < 128 then return code, at end
  if code < 144 then return map_at(s, at, code - 128) end
  if code < 160 then return array_at(s, at, code - 144) end
  if code < 192 then return sub(s, at, at + code - 161), at + code - 160 end
  if code >= 224 then return code - 256, at end
  if code == 192 then return nil, at end
  if code == 194 then return false, at end
  if code == 195 then return true, at end
  local bytes = UNSIGNED[code]
  if bytes then return number_at(s, at, bytes), at + bytes end
  bytes = STRINGS[code]
  if bytes then
    local first = at + bytes
    local past = first + number_at(s, at, bytes)
    return sub(s, first, past - 1), past
  end
  bytes = ARRAYS[code]
  if bytes then return array_at(s, at + bytes, number_at(s, at, bytes)) end
  bytes = MAPS[code]
  if bytes then return map_at(s, at + bytes, number_at(s, at, bytes)) end
  if code == 203 then return double_at(s, at), at + 8 end
  bytes = SIGNED[code]
  if bytes then
    local n = number_at(s, at, bytes)
    return n >= 2 ^ (8 * bytes - 1) and n - 2 ^ (8 * bytes) or n, at + bytes
  end
  if code == 211 then
    local high = number_at(s, at, 4)
    if high >= 2 ^ 31 then high = high - 2 ^ 32 end
    return high * 2 ^ 32 + number_at(s, at + 4, 4), at + 8
  end
  error('cmsgpack does not read code ' .. code)
end

cmsgpack = {
  pack = function(...)
    local out = {}
    for i = 1, select('#', ...) do out[i] = packed((select(i, ...))) end
    return concat(out)
  end,
  unpack = function(s) return (unpacked(s, 1)) end,
}

struct = {
  pack = function(form, n)
    assert(form == '>I4')
    return big_endian(n, 4)
  end,
}
