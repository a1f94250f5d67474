// Numbers as an operator reads them.

export const NONE = "–";

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(value < 0.995 ? 2 : 1)} s`;
  return value < 120 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`;
}

export function age(value) {
  if (value < 1) return "now";
  if (value < 120) return `${Math.floor(value)} s ago`;
  return value < 7200 ? `${Math.floor(value / 60)} min ago` : `${Math.floor(value / 3600)} h ago`;
}

export function percent(share) {
  if (share === null || share === undefined) return NONE;
  const value = 100 * share;
  // Never "100 %" for less than all.
  return value > 99 && value < 100 ? `${(Math.floor(value * 10) / 10).toFixed(1)} %` : `${Math.round(value)} %`;
}

export function count(value) {
  if (value < 10000) return String(Math.round(value * 10) / 10);
  return value < 1e6 ? `${Math.round(value / 1000)}K` : `${(value / 1e6).toFixed(1)}M`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/** A block's hash, a decimal of 64 bits with a sign, as eight hexadecimal digits. */
export function shortHash(decimal) {
  return BigInt.asUintN(64, BigInt(decimal)).toString(16).padStart(16, "0").slice(0, 8);
}

export function plural(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}
