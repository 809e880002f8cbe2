// Reads a file VARIANT.DTYPE.txt of vectors/, without a crate. docs/checking.md describes it.
use std::{collections::HashMap, str::FromStr, str::SplitWhitespace};

#[derive(Default)]
pub struct Array { pub bits: i32, pub block: usize, pub values: Vec<f32>, pub lo: Vec<f32>, pub hi: Vec<f32> }
pub struct Test { pub id: i32, pub flag: String, pub n: usize, pub eps: f64, pub offset: i8, pub norm: i32 }

pub fn number<T: FromStr>(words: &mut SplitWhitespace) -> T {
    words.next().and_then(|word| word.parse().ok()).unwrap_or_else(|| {
        eprintln!("the file is cut off, or is no vectors in format 1");
        std::process::exit(2)
    })
}

fn list(words: &mut SplitWhitespace, count: usize) -> Vec<f32> {
    (0..count).map(|_| f32::from_bits(u32::from_str_radix(&number::<String>(words), 16).expect("bits"))).collect()
}

fn hashed(seed: u32, i: u32, bits: i32, exponent: i32) -> f32 { // an element of a large input
    let mut z = seed.wrapping_add(i.wrapping_mul(0x9E3779B9));
    z = (z ^ z >> 16).wrapping_mul(0x85EBCA6B);
    z = (z ^ z >> 13).wrapping_mul(0xC2B2AE35);
    (((z ^ z >> 16) >> (32 - bits)) as f64 * 2f64.powi(exponent - bits + 1) - 2f64.powi(exponent)) as f32
}

pub fn next(words: &mut SplitWhitespace) -> (Test, HashMap<String, Array>) { // of an output there are lo and hi
    let _test: String = number(words);
    let (id, flag, _, n, eps) = (number(words), number(words), number::<u32>(words), number(words), number(words));
    let (offset, norm, mut arrays) = (number(words), number(words), HashMap::new());
    loop {
        let kind: String = number(words);
        if kind == "end" { return (Test { id, flag, n, eps, offset, norm }, arrays); }
        let (name, bits, size): (String, i32, usize) = (number(words), number(words), number(words));
        let (first, second): (u32, i32) = (number(words), number(words));
        let mut a = Array { bits, block: first as usize, ..Array::default() };
        match kind.as_str() {
            "hash" => a.values = (0..size as u32).map(|i| hashed(first, i, bits, second)).collect(),
            "in" => a.values = list(words, size),
            _ => (a.lo, a.hi) = (list(words, second as usize), list(words, second as usize)),
        }
        arrays.insert(name, a);
    }
}
