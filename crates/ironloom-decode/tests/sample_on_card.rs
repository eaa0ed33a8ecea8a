//! A graphics card's sampler gives the ids of the host's, for every kind of option, logits and vocabulary.
//!
//! Without a card each test says that it was skipped.

use ironloom_core::Philox;
use ironloom_decode::{Sampler, SamplerOptions};
use ironloom_kernels::{Buffer, Error, Gpu, Sample, SampleOptions, sample, sample_workspace};

fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error @ (Error::NoDriver | Error::NoDevice { .. })) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut draws = Philox::new(seed, 0);
    (0..count).map(|_| draws.next_normal()).collect()
}

fn upload<T: bytemuck::NoUninit>(gpu: &Gpu, values: &[T]) -> Buffer {
    gpu.upload(bytemuck::cast_slice(values), "a test").unwrap()
}

/// A row: its options, its ids so far, its logits.
struct Row {
    options: SamplerOptions,
    history: Vec<u32>,
    logits: Vec<f32>,
}

fn on_host(row: &Row) -> u32 {
    Sampler::new(row.options.clone()).unwrap().sample(&row.logits, &row.history).unwrap_or(u32::MAX)
}

fn on_device(gpu: &Gpu, rows: &[Row]) -> Vec<u32> {
    let vocabulary = rows[0].logits.len();
    let histories: Vec<Buffer> = rows.iter().map(|row| upload(gpu, &row.history)).collect();
    let options: Vec<SampleOptions> = rows
        .iter()
        .zip(&histories)
        .map(|(row, history)| SampleOptions {
            history: history.slice().address(),
            seed: row.options.seed,
            penalty_window: row.options.penalty_window.map_or(u32::MAX, |window| window as u32),
            top_k: row.options.top_k as u32,
            temperature: row.options.temperature,
            top_p: row.options.top_p,
            min_p: row.options.min_p,
            repetition_penalty: row.options.repetition_penalty,
            presence_penalty: row.options.presence_penalty,
            frequency_penalty: row.options.frequency_penalty,
        })
        .collect();
    let options = upload(gpu, &options);
    let positions: Vec<i32> = rows.iter().map(|row| row.history.len() as i32 - 1).collect();
    let positions = upload(gpu, &positions);
    let all: Vec<f32> = rows.iter().flat_map(|row| row.logits.iter().copied()).collect();
    let workspace = upload(gpu, &vec![0u8; sample_workspace(rows.len() + 1, vocabulary).unwrap()]);
    let ids = upload(gpu, &vec![u32::MAX; rows.len()]);
    let mut found = Vec::new();
    // Twice, from fresh logits: the first call leaves the workspace ready for the second.
    for _ in 0..2 {
        let logits = upload(gpu, &all);
        let call = Sample {
            logits: logits.slice(),
            options: options.slice(),
            positions: positions.slice(),
            ids: ids.slice(),
            workspace: workspace.slice(),
            rows: rows.len(),
            vocabulary,
        };
        sample(gpu, &call).unwrap();
        let mut chosen = vec![0u32; rows.len()];
        gpu.read(ids.slice(), bytemuck::cast_slice_mut(&mut chosen)).unwrap();
        found.push(chosen);
        assert!(sample(gpu, &Sample { rows: rows.len() + 1, ..call }).is_err());
        assert!(sample(gpu, &Sample { vocabulary: 0, ..call }).is_err());
    }
    assert_eq!(found[0], found[1], "the same twice");
    found.remove(0)
}

fn check(gpu: &Gpu, rows: &[Row], what: &str) {
    for (place, (row, found)) in rows.iter().zip(on_device(gpu, rows)).enumerate() {
        let expected = on_host(row);
        assert_eq!(found, expected, "{what}, row {place}, {} ids so far, {:?}", row.history.len(), row.options);
    }
}

fn all_options() -> Vec<SamplerOptions> {
    let base = SamplerOptions::default;
    let penalties = SamplerOptions {
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: -0.2,
        penalty_window: None,
        ..base()
    };
    vec![
        SamplerOptions::greedy(),
        SamplerOptions { temperature: 0.0, ..penalties.clone() },
        base(),
        SamplerOptions { temperature: 0.7, ..base() },
        SamplerOptions { top_k: 1, ..base() },
        SamplerOptions { top_k: 50, temperature: 0.8, ..base() },
        SamplerOptions { top_k: 40, top_p: 0.95, ..base() },
        SamplerOptions { top_k: 20, top_p: 0.8, temperature: 0.7, repetition_penalty: 1.05, ..base() },
        SamplerOptions { top_k: 1000, top_p: 0.99, temperature: 2.0, ..base() },
        SamplerOptions { top_k: 1024, temperature: 3.0, ..base() },
        SamplerOptions { top_k: 1025, temperature: 3.0, ..base() },
        SamplerOptions { top_k: 5000, top_p: 0.9, min_p: 0.001, temperature: 1.5, ..base() },
        SamplerOptions { top_p: 0.9, ..base() },
        SamplerOptions { top_p: 0.95, temperature: 4.0, ..base() },
        SamplerOptions { top_p: 0.01, ..base() },
        SamplerOptions { top_p: 0.999_999, temperature: 0.3, ..base() },
        SamplerOptions { min_p: 0.05, ..base() },
        SamplerOptions { min_p: 0.1, top_p: 0.9, top_k: 64, ..base() },
        SamplerOptions { min_p: 0.3, top_p: 0.7, ..base() },
        penalties.clone(),
        SamplerOptions { top_k: 30, top_p: 0.9, penalty_window: Some(5), ..penalties.clone() },
        SamplerOptions { top_p: 0.9, penalty_window: Some(0), ..penalties },
        SamplerOptions { temperature: f32::MIN_POSITIVE, ..base() },
        SamplerOptions { temperature: 1e30, top_p: 0.5, ..base() },
    ]
}

fn rows(vocabulary: usize, seed: u64, logits: impl Fn(u64) -> Vec<f32>) -> Vec<Row> {
    let mut draws = Philox::new(seed, 1);
    all_options()
        .into_iter()
        .enumerate()
        .map(|(place, options)| {
            let length = 1 + draws.next_u32() as usize % 300;
            // Mostly low ids, so that some come many times; some that have no logit.
            let history = (0..length)
                .map(|_| draws.next_u32() % if draws.next_u32().is_multiple_of(4) { 300_000 } else { 50 })
                .collect();
            let options = SamplerOptions { seed: seed << 33 | place as u64, ..options };
            Row { options, history, logits: logits(seed * 100 + place as u64)[..vocabulary].to_vec() }
        })
        .collect()
}

/// A test for each vocabulary, so that sanitizers see each to its end.
macro_rules! test_vocabularies {
    ($module:ident, $check:ident, $($name:ident: $vocabulary:expr),+ $(,)?) => {
        mod $module {
            $(#[test]
            fn $name() {
                super::$check($vocabulary);
            })+
        }
    };
}

test_vocabularies!(
    ids_are_those_of_the_host,
    normal,
    of_1: 1,
    of_7: 7,
    of_333: 333,
    of_1000: 1000,
    of_1025: 1025,
    of_2049: 2049,
    of_30000: 30_000,
    of_49152: 49_152,
    of_151936: 151_936,
    of_262208: 262_208,
);

fn normal(vocabulary: usize) {
    let Some(gpu) = gpu() else { return };
    // Small ones are cheap: more draws.
    let times = if vocabulary < 10_000 { 8 } else { 2 };
    for time in 0..times {
        let rows = rows(vocabulary, time + 1, |seed| normals(seed, vocabulary).iter().map(|x| 4.0 * x).collect());
        check(&gpu, &rows, &format!("{vocabulary} normal logits"));
    }
}

test_vocabularies!(
    ties_and_flat_distributions_are_cut_as_on_the_host,
    ties_and_flat,
    of_900: 900,
    of_5000: 5000,
    of_50257: 50_257,
);

fn ties_and_flat(vocabulary: usize) {
    let Some(gpu) = gpu() else { return };
    let levels = rows(vocabulary, 3, |seed| normals(seed, vocabulary).iter().map(|x| (2.0 * x).round()).collect());
    check(&gpu, &levels, &format!("{vocabulary} logits on few levels"));
    let flat = rows(vocabulary, 4, |seed| normals(seed, vocabulary).iter().map(|x| 1e-3 * x).collect());
    check(&gpu, &flat, &format!("{vocabulary} logits close to each other"));
    let equal = rows(vocabulary, 5, |_| vec![-2.5; vocabulary]);
    check(&gpu, &equal, &format!("{vocabulary} equal logits"));
    let masked = rows(vocabulary, 6, |seed| {
        let draws = normals(seed, vocabulary);
        draws.iter().map(|&x| if x < 1.5 { f32::NEG_INFINITY } else { 10.0 * x }).collect()
    });
    check(&gpu, &masked, &format!("{vocabulary} logits, most of them masked"));
    // The likeliest side by side, where groups hold many.
    let sorted = rows(vocabulary, 7, |seed| {
        let mut logits: Vec<f32> = normals(seed, vocabulary).iter().map(|x| 3.0 * x).collect();
        logits.sort_unstable_by(f32::total_cmp);
        logits
    });
    check(&gpu, &sorted, &format!("{vocabulary} logits in ascending order"));
}

#[test]
fn a_row_does_not_depend_on_those_beside_it() {
    let Some(gpu) = gpu() else { return };
    let rows = rows(20_000, 8, |seed| normals(seed, 20_000));
    let together = on_device(&gpu, &rows);
    for (place, row) in rows.iter().enumerate() {
        assert_eq!(on_device(&gpu, std::slice::from_ref(row)), [together[place]], "row {place}");
    }
}

#[test]
fn rows_without_a_distribution_are_marked_and_rows_out_of_use_are_left() {
    let Some(gpu) = gpu() else { return };
    for options in all_options() {
        let vocabulary = 3000;
        let row = |change: &dyn Fn(&mut Vec<f32>)| {
            let mut logits = normals(1, vocabulary);
            change(&mut logits);
            Row { options: options.clone(), history: vec![2999], logits }
        };
        let mut rows = vec![
            row(&|logits| logits[17] = f32::NAN),
            row(&|logits| logits[2998] = f32::INFINITY),
            row(&|logits| logits.fill(f32::NEG_INFINITY)),
            row(&|logits| logits[..2500].fill(f32::NEG_INFINITY)),
            row(&|_| ()),
        ];
        assert_eq!(rows[..3].iter().map(on_host).collect::<Vec<_>>(), [u32::MAX; 3]);
        check(&gpu, &rows, "logits that are no distribution");
        rows[1].history.clear();
        assert_eq!(on_device(&gpu, &rows)[1], 0, "a row at position -1");
    }
}
