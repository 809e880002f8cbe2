// Two kernels, one of which is wrong, judged by files of vectors/:
//
//     rustc -O -o judge examples/vectors/kernel.rs
//     ./judge right vectors/llama.*.txt        prints the count alone
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

fn refuse(why: String) -> ! {
    eprintln!("{why}");
    std::process::exit(2);
}

fn rms_norm(t: &Test, arrays: &mut HashMap<String, Array>, eps_outside: bool) { // without values: not judged
    for name in ["x", "scale", "y", "inverse_rms"] {
        if !arrays.contains_key(name) { refuse(format!("test {} has no {name}", t.id)); }
    }
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
    if arguments.len() < 3 || !["right", "wrong"].contains(&arguments[1].as_str()) {
        refuse(format!("usage: {} right|wrong vectors/VARIANT.DTYPE.txt ...", arguments[0]));
    }
    let (mut tests, mut judged, mut wrong) = (0, 0, 0);
    for path in &arguments[2..] {
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| refuse(format!("{path}: {error}")));
        let words = &mut text.split_whitespace();
        if !words.by_ref().take(3).eq(["rmsnorm", "vectors", "1"]) { refuse(format!("{path}: no vectors in format 1")); }
        let (name, count): (String, usize) = (number(words), number(words));
        for _ in 0..count {
            let (test, mut arrays) = next(words);
            rms_norm(&test, &mut arrays, arguments[1] == "wrong");
            let mut names: Vec<&String> = arrays.keys().filter(|name| is_wrong(&arrays[*name])).collect();
            names.sort();
            names.iter().for_each(|quantity| println!("{name} {} {} {quantity}", test.id, test.flag));
            tests += 1;
            judged += arrays.values().filter(|a| !a.lo.is_empty() && !a.values.is_empty()).count();
            wrong += names.len();
        }
    }
    eprintln!("{tests} tests, {judged} outputs judged, {wrong} wrong");
    std::process::exit(if judged == 0 { 2 } else { (wrong > 0) as i32 });
}
