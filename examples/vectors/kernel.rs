// Two kernels, one of which is wrong, judged by files of vectors/:
//
//     rustc -O -o judge examples/vectors/kernel.rs
//     ./judge right vectors/llama.*.txt        prints nothing
//     ./judge wrong vectors/llama.*.txt        prints a line for each output that is wrong
mod reader;
use reader::{next, number, Array, Test};
use std::collections::HashMap;

fn rounded(v: f64, bits: i32) -> f64 { // to nearest, ties to even, in a format of 8, 11 or 24 bits
    if bits == 24 || v == 0.0 || !v.is_finite() { return v as f32 as f64; }
    let least = if bits == 11 { -14 } else { -126 };
    let exponent = (((v.to_bits() >> 52) & 2047) as i32 - 1023).max(least);
    let step = 2f64.powi(exponent + 1 - bits);
    let result = (v / step).round_ties_even() * step;
    if result.abs() >= 2f64.powi(if bits == 11 { 16 } else { 128 }) { f64::INFINITY.copysign(v) } else { result }
}

fn rms_norm(t: &Test, arrays: &mut HashMap<String, Array>, eps_outside: bool) { // without values: not judged
    let (x, scale, residual) = (&arrays["x"], &arrays["scale"], arrays.get("residual"));
    let (mut y, mut inverses) = (Vec::new(), Vec::new());
    for start in (0..x.values.len()).step_by(t.n) {
        let row: Vec<f64> = (start..start + t.n).map(|i| match residual {
            Some(r) => rounded(x.values[i] as f64 + r.values[i] as f64, x.bits),
            None => x.values[i] as f64,
        }).collect();
        let mean = row.iter().map(|h| h * h).sum::<f64>() / t.n as f64;
        let inverse = 1.0 / if eps_outside { mean.sqrt() + t.eps } else { (mean + t.eps).sqrt() };
        inverses.push(inverse as f32);
        for (h, gain) in row.iter().zip(&scale.values) {
            let normed = if t.norm > 0 { rounded(h * inverse, t.norm) } else { h * inverse };
            y.push(rounded((normed * (t.offset as f64 + *gain as f64)) as f32 as f64, arrays["y"].bits) as f32);
        }
    }
    arrays.get_mut("y").unwrap().values = y;
    arrays.get_mut("inverse_rms").unwrap().values = inverses;
}

fn is_wrong(a: &Array) -> bool {
    a.values.chunks(a.block.max(1)).zip(a.lo.iter().zip(&a.hi)).any(|(block, (lo, hi))| {
        let sum: f64 = block.iter().zip(1..).map(|(a, i)| i as f64 * *a as f64).sum(); // of one element, if block is 1
        if lo.is_nan() { !sum.is_nan() } else { !(*lo as f64 <= sum && sum <= *hi as f64) }
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let mut wrong = 0;
    for path in &arguments[2..] {
        let text = std::fs::read_to_string(path).expect(path);
        let words = &mut text.split_whitespace();
        assert!(words.by_ref().take(3).eq(["rmsnorm", "vectors", "1"]), "no vectors in format 1");
        let (name, count): (String, usize) = (number(words), number(words));
        for _ in 0..count {
            let (test, mut arrays) = next(words);
            rms_norm(&test, &mut arrays, arguments[1] == "wrong");
            let mut names: Vec<&String> = arrays.keys().filter(|name| is_wrong(&arrays[*name])).collect();
            names.sort();
            for quantity in names {
                println!("{name} {} {} {quantity}", test.id, test.flag);
                wrong += 1;
            }
        }
    }
    std::process::exit((wrong > 0) as i32);
}
