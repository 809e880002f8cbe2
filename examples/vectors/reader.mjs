// Reads the files VARIANT.DTYPE.json of vectors/, with Node.js alone. docs/checking.md describes them.
import { readFileSync } from "node:fs";

export const BITS = { bfloat16: 8, float16: 11, float32: 24 }; // of the significand
const view = new DataView(new ArrayBuffer(8));

function decoded(dtype, word) {
  view.setBigUint64(0, BigInt("0x" + word.padEnd(16, "0")));
  if (dtype !== "float16") return dtype === "float64" ? view.getFloat64(0) : view.getFloat32(0);
  const code = parseInt(word, 16), exponent = (code >> 10) & 31, rest = (code & 1023) + (exponent ? 1024 : 0);
  const size = exponent < 31 ? rest * 2 ** (Math.max(exponent, 1) - 25) : rest > 1024 ? NaN : Infinity;
  return code >> 15 ? -size : size;
}

function numbers(dtype, text) {
  return text.split(" ").map((word) => decoded(dtype, word));
}

function hashed({ seed, exponent, dtype, shape }) {
  return Array.from({ length: shape.reduce((a, b) => a * b) }, (_, i) => {
    let z = seed + Math.imul(i, 0x9e3779b9);
    z = Math.imul(z ^ (z >>> 16), 0x85ebca6b);
    z = Math.imul(z ^ (z >>> 13), 0xc2b2ae35);
    return ((z ^ (z >>> 16)) >>> (32 - BITS[dtype])) * 2 ** (exponent - BITS[dtype] + 1) - 2 ** exponent;
  });
}

export function* tests(path) { // the inputs are lists of numbers, and of the outputs lo and hi
  const { format, variant, dtype, tests } = JSON.parse(readFileSync(path, "utf8"));
  if (format !== 1) throw new Error(`${path}: no vectors in format 1`);
  for (const test of tests) {
    for (const [name, entry] of Object.entries(test.inputs))
      test.inputs[name] = "seed" in entry ? hashed(entry) : numbers(entry.dtype, entry.bits);
    for (const entry of Object.values(test.outputs))
      for (const end of ["lo", "hi"])
        entry[end] = numbers(entry.block > 1 ? "float32" : entry.dtype, entry[end]);
    yield { ...test, eps: decoded("float64", test.eps), file: `${variant}.${dtype}` };
  }
}
