//! What is written is read back the same; the safetensors crate, which others wrote, reads ours and we read its.

mod forge;

use std::{collections::HashMap, ops::ControlFlow};

use ironloom_weights::{
    Array, Checkpoint, DType, Error, Format, Metadata, NewTensor, Progress, Shape, Strings, TensorInfo, Value, gguf,
    safetensors, unwatched,
};
use proptest::prelude::*;

/// A finite float, so that equality means the same bits.
fn float() -> impl Strategy<Value = f32> {
    any::<f32>().prop_filter("finite", |value| value.is_finite())
}

fn array() -> impl Strategy<Value = Array> {
    let leaf = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..5).prop_map(Array::U8),
        prop::collection::vec(any::<i8>(), 0..5).prop_map(Array::I8),
        prop::collection::vec(any::<u16>(), 0..5).prop_map(Array::U16),
        prop::collection::vec(any::<i16>(), 0..5).prop_map(Array::I16),
        prop::collection::vec(any::<u32>(), 0..5).prop_map(Array::U32),
        prop::collection::vec(any::<i32>(), 0..5).prop_map(Array::I32),
        prop::collection::vec(any::<u64>(), 0..5).prop_map(Array::U64),
        prop::collection::vec(any::<i64>(), 0..5).prop_map(Array::I64),
        prop::collection::vec(float(), 0..5).prop_map(Array::F32),
        prop::collection::vec(float().prop_map(f64::from), 0..5).prop_map(Array::F64),
        prop::collection::vec(any::<bool>(), 0..5).prop_map(Array::Bool),
        prop::collection::vec(".{0,6}", 0..5).prop_map(|list| Array::Strings(list.into_iter().collect::<Strings>())),
    ];
    // Three levels of lists around a leaf are the most the format's reader takes.
    leaf.prop_recursive(3, 12, 3, |inner| prop::collection::vec(inner, 0..3).prop_map(Array::Arrays))
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        float().prop_map(Value::F32),
        float().prop_map(|value| Value::F64(value.into())),
        any::<bool>().prop_map(Value::Bool),
        ".{0,20}".prop_map(Value::String),
        array().prop_map(Value::Array),
    ]
}

/// Tensors of the types `allowed` takes; rows are whole blocks.
fn tensors(
    allowed: fn(DType) -> bool,
    ranks: std::ops::RangeInclusive<usize>,
) -> impl Strategy<Value = Vec<TensorInfo>> {
    let dtypes: Vec<DType> = DType::ALL.iter().copied().filter(|&dtype| allowed(dtype)).collect();
    let tensor = (prop::sample::select(dtypes), prop::collection::vec(1usize..4, ranks));
    prop::collection::vec(tensor, 0..7).prop_map(|tensors| {
        let info = |(i, (dtype, mut dims)): (usize, (DType, Vec<usize>))| {
            if let Some(row) = dims.last_mut() {
                *row *= dtype.block_elements();
            }
            TensorInfo { name: format!("tensor.{i}\"é"), dtype, shape: Shape::new(&dims).unwrap() }
        };
        tensors.into_iter().enumerate().map(info).collect()
    })
}

fn bytes_of(info: &TensorInfo) -> Vec<u8> {
    let seed = info.name.bytes().fold(0u8, u8::wrapping_add);
    (0..info.bytes().unwrap()).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect()
}

fn new_tensors(infos: &[TensorInfo]) -> Vec<NewTensor<'_>> {
    infos.iter().map(|info| NewTensor::made(info.clone(), || Ok(bytes_of(info)))).collect()
}

fn check_tensors(checkpoint: &Checkpoint, infos: &[TensorInfo]) -> Result<(), TestCaseError> {
    prop_assert_eq!(checkpoint.tensors().len(), infos.len());
    for info in infos {
        prop_assert_eq!(checkpoint.info(&info.name), Some(info));
        prop_assert!(checkpoint.unused().contains(&info.name));
        let data = checkpoint.tensor(&info.name).unwrap();
        prop_assert_eq!(&data.bytes[..], &bytes_of(info)[..]);
    }
    prop_assert!(checkpoint.unused().is_empty());
    Ok(())
}

fn read_by_their_crate(bytes: &[u8], infos: &[TensorInfo]) -> Result<(), TestCaseError> {
    let theirs = ::safetensors::SafeTensors::deserialize(bytes).unwrap();
    prop_assert_eq!(theirs.len(), infos.len());
    for info in infos {
        let tensor = theirs.tensor(&info.name).unwrap();
        prop_assert_eq!(tensor.shape(), info.shape.dims());
        prop_assert_eq!(tensor.data(), &bytes_of(info)[..]);
        prop_assert_eq!(format!("{:?}", tensor.dtype()), info.dtype.name());
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn gguf_round_trip(
        pairs in prop::collection::vec(("[a-z.é]{1,12}", value()), 0..8),
        infos in tensors(|dtype| dtype.gguf_id().is_some(), 1..=4),
        alignment in prop::option::of(prop::sample::select(vec![1u32, 8, 32, 4096])),
    ) {
        let mut metadata = Metadata::new();
        for (key, value) in pairs {
            metadata.insert(key, value);
        }
        if let Some(alignment) = alignment {
            metadata.insert("general.alignment", alignment);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut last = None;
        gguf::write(&path, &metadata, new_tensors(&infos), &mut |progress| {
            last = Some((progress.tensors, progress.bytes, progress.total_bytes));
            ControlFlow::Continue(())
        }).unwrap();
        if let Some((tensors, bytes, total)) = last {
            prop_assert_eq!((tensors, bytes), (infos.len(), total));
        }
        let checkpoint = ironloom_weights::open(&path).unwrap();
        prop_assert_eq!(checkpoint.format(), Format::Gguf { version: 3 });
        prop_assert_eq!(
            checkpoint.metadata().iter().collect::<Vec<_>>(),
            metadata.iter().collect::<Vec<_>>()
        );
        check_tensors(&checkpoint, &infos)?;
        // Written again from the mapped file, the bytes are the same.
        let again = folder.path().join("again.gguf");
        let names: Vec<String> = checkpoint.tensors().map(|info| info.name.clone()).collect();
        let copies = names.iter().map(|name| checkpoint.tensor(name).unwrap().into()).collect();
        gguf::write(&again, checkpoint.metadata(), copies, &mut unwatched).unwrap();
        prop_assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(&again).unwrap());
        prop_assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
    }

    #[test]
    fn safetensors_round_trip(
        pairs in prop::collection::vec((".{1,12}", ".{0,12}"), 0..4),
        infos in tensors(|dtype| !dtype.is_packed(), 0..=6),
        max_shard_bytes in 1u64..200,
    ) {
        let mut metadata = Metadata::new();
        for (key, value) in pairs {
            metadata.insert(key, value);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("single.safetensors");
        safetensors::write(&path, &metadata, new_tensors(&infos), &mut unwatched).unwrap();
        let checkpoint = ironloom_weights::open(&path).unwrap();
        prop_assert_eq!(
            checkpoint.metadata().iter().collect::<Vec<_>>(),
            metadata.iter().collect::<Vec<_>>()
        );
        check_tensors(&checkpoint, &infos)?;
        read_by_their_crate(&std::fs::read(&path).unwrap(), &infos)?;

        let sharded = folder.path().join("sharded");
        safetensors::write_sharded(&sharded, &metadata, new_tensors(&infos), max_shard_bytes, &mut unwatched).unwrap();
        check_tensors(&ironloom_weights::open(&sharded).unwrap(), &infos)?;
        let total: usize = infos.iter().map(|info| info.bytes().unwrap()).sum();
        let index = sharded.join("model.safetensors.index.json");
        prop_assert_eq!(index.exists(), total as u64 > max_shard_bytes && infos.len() > 1);
        if index.exists() {
            check_tensors(&ironloom_weights::open(&index).unwrap(), &infos)?;
        }
    }

    #[test]
    fn their_safetensors_reads(infos in tensors(|dtype| !dtype.is_packed(), 0..=6)) {
        let data: Vec<Vec<u8>> = infos.iter().map(bytes_of).collect();
        let views = infos.iter().zip(&data).map(|(info, bytes)| {
            use ::safetensors::Dtype::*;
            let dtype = [F32, F16, BF16, F64, I8, I16, I32, I64, U8, U32, BOOL]
                .into_iter()
                .find(|dtype| format!("{dtype:?}") == info.dtype.name())
                .unwrap();
            let view = ::safetensors::tensor::TensorView::new(dtype, info.shape.dims().to_vec(), bytes).unwrap();
            (info.name.clone(), view)
        });
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let bytes = ::safetensors::serialize(views, Some(metadata)).unwrap();
        let checkpoint = forge::open_bytes("theirs.safetensors", &bytes).unwrap();
        prop_assert_eq!(checkpoint.metadata().required_string("format").unwrap(), "pt");
        check_tensors(&checkpoint, &infos)?;
    }
}

fn one(name: &str, dtype: DType, dims: &[usize]) -> TensorInfo {
    TensorInfo { name: name.into(), dtype, shape: Shape::new(dims).unwrap() }
}

/// A failure in the middle leaves the folder as it was.
#[test]
fn a_failed_write_leaves_the_old_file_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let good = one("good", DType::F32, &[100_000]);
    let bad = one("bad", DType::F32, &[2]);
    let failing = || {
        vec![
            NewTensor::new(good.clone(), bytes_of(&good)),
            NewTensor::made(bad.clone(), || Err("the maker's own reason".into())),
        ]
    };
    for name in ["model.gguf", "model.safetensors"] {
        let path = folder.path().join(name);
        std::fs::write(&path, "old").unwrap();
        let write = if name.ends_with("gguf") { gguf::write } else { safetensors::write };
        let error = write(&path, &Metadata::new(), failing(), &mut unwatched).unwrap_err();
        assert!(matches!(error, Error::NewTensor { .. }) && error.to_string().contains("the maker's own reason"));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    let shards = folder.path().join("shards");
    safetensors::write_sharded(&shards, &Metadata::new(), failing(), 16, &mut unwatched).unwrap_err();
    assert_eq!(std::fs::read_dir(&shards).unwrap().count(), 0);
}

/// Even after the last tensor.
#[test]
fn a_cancelled_write_leaves_the_old_files_and_nothing_else() {
    let infos = [one("a", DType::F32, &[4]), one("b", DType::F32, &[4])];
    let none = Metadata::new();
    for after in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let stop = &mut |progress: Progress<'_>| match progress.tensors < after {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        };
        let (gguf, single) = (folder.path().join("model.gguf"), folder.path().join("single.safetensors"));
        for path in [&gguf, &single] {
            std::fs::write(path, "old").unwrap();
        }
        for error in [
            gguf::write(&gguf, &none, new_tensors(&infos), stop).unwrap_err(),
            safetensors::write(&single, &none, new_tensors(&infos), stop).unwrap_err(),
            safetensors::write_sharded(folder.path(), &none, new_tensors(&infos), 16, stop).unwrap_err(),
        ] {
            assert!(matches!(error, Error::Cancelled { .. }), "{error}");
        }
        assert_eq!([&gguf, &single].map(|path| std::fs::read(path).unwrap()), [b"old", b"old"]);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}

#[test]
fn writers_refuse_what_the_formats_cannot_hold() {
    let folder = tempfile::tempdir().unwrap();
    let gguf_error = |metadata: &Metadata, infos: &[TensorInfo]| {
        let path = folder.path().join("model.gguf");
        gguf::write(path, metadata, new_tensors(infos), &mut unwatched).unwrap_err()
    };
    let none = Metadata::new();
    assert!(matches!(gguf_error(&none, &[one("a", DType::Bool, &[1])]), Error::UnknownType { .. }));
    assert!(matches!(gguf_error(&none, &[one("a", DType::F32, &[1; 5])]), Error::Rank { .. }));
    assert!(matches!(gguf_error(&none, &[one("a", DType::F32, &[])]), Error::Rank { .. }));
    assert!(matches!(gguf_error(&none, &[one("", DType::F32, &[1])]), Error::NameLength { .. }));
    let twice = [one("a", DType::F32, &[1]), one("a", DType::F32, &[1])];
    assert!(matches!(gguf_error(&none, &twice), Error::DuplicateTensor { .. }));
    let mut odd = Metadata::new();
    odd.insert("general.alignment", 24u32);
    assert!(matches!(gguf_error(&odd, &[]), Error::Alignment { .. }));
    let mut deep = Metadata::new();
    deep.insert("deep", (0..5).fold(Array::U8(vec![]), |inner, _| Array::Arrays(vec![inner])));
    assert!(matches!(gguf_error(&deep, &[]), Error::Nesting { .. }));
    let short = vec![NewTensor::new(one("a", DType::F32, &[2]), vec![0; 7])];
    let error = gguf::write(folder.path().join("short.gguf"), &none, short, &mut unwatched).unwrap_err();
    forge::says(&error, &["\"a\"", "8 bytes", "7 bytes"]);

    let safetensors_error = |metadata: &Metadata, infos: &[TensorInfo]| {
        let path = folder.path().join("model.safetensors");
        safetensors::write(path, metadata, new_tensors(infos), &mut unwatched).unwrap_err()
    };
    assert!(matches!(safetensors_error(&none, &[one("a", DType::Q4_0, &[32])]), Error::UnknownType { .. }));
    assert!(matches!(safetensors_error(&none, &[one("__metadata__", DType::U8, &[1])]), Error::ReservedName { .. }));
    let mut number = Metadata::new();
    number.insert("count", 3u32);
    assert!(matches!(safetensors_error(&number, &[]), Error::StringsOnly { .. }));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn shards_are_not_written_beside_a_file_that_hides_them() {
    let folder = tempfile::tempdir().unwrap();
    let infos = [one("a", DType::F32, &[4]), one("b", DType::F32, &[4])];
    let write =
        |max| safetensors::write_sharded(folder.path(), &Metadata::new(), new_tensors(&infos), max, &mut unwatched);
    write(1000).unwrap();
    assert!(matches!(write(16), Err(Error::InTheWay { .. })));
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    write(16).unwrap();
    assert!(matches!(write(1000), Err(Error::InTheWay { .. })));
}
