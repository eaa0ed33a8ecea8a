//! Faults that people reported about readers of model files, as cases, named by project and number: crafted GGUF heads that
//! crash or overflow, safetensors refused or misread, downloads that are something else. Each file is made here byte by byte.

#[path = "../../crates/ironloom-weights/tests/forge/mod.rs"]
mod forge;

use forge::{ARRAY, F32, Gguf, Q4_0, STRING, U32, open_bytes, refusal, safetensors, says, string};
use ironloom_weights::{Error, Metadata, NewTensor, Place, unwatched};

/// ggml pull request 709: counts, lengths and dimensions whose products wrap led to writes past the heap.
#[test]
fn ggml_709_counts_and_lengths_that_wrap() {
    for counts in [(u64::MAX, 0), (0, u64::MAX), (u64::MAX / 33 + 2, 0), (0, u64::MAX / 14 + 2)] {
        let mut file = Gguf::new();
        file.counts = Some(counts);
        let error = refusal("counts.gguf", &file.build());
        assert!(matches!(error, Error::Count { .. }), "{counts:?}: {error}");
    }
    // An array of u32 whose byte size is 2^64 + 4.
    let array = [U32.to_le_bytes().to_vec(), ((1u64 << 62) + 1).to_le_bytes().to_vec(), vec![0; 64]].concat();
    let error = refusal("array.gguf", &Gguf::new().key("sizes", ARRAY, &array).build());
    assert!(matches!(&error, Error::Truncated { place: Place::Key(key), .. } if key == "sizes"), "{error}");
    let text = [u64::MAX.to_le_bytes().to_vec(), vec![b'a'; 64]].concat();
    let error = refusal("string.gguf", &Gguf::new().key("text", STRING, &text).build());
    says(&error, &["\"text\"", "cut or damaged"]);
}

/// llama.cpp pull request 18674: dimensions of 2^42 + 1 make a byte size that wraps to a few bytes.
#[test]
fn llama_cpp_18674_wrapping_dimensions() {
    let wrapping = (1u64 << 42) + 1;
    for dims in [vec![wrapping, wrapping], vec![1 << 62, 1], vec![1 << 32, 1 << 32], vec![u64::MAX, 2], vec![2; 4]] {
        let sound = dims == [2; 4];
        let bytes = Gguf::new().entry("blk.0.attn_q.weight", &dims, F32, 0).data(64).build();
        if sound {
            open_bytes("sound.gguf", &bytes).expect("the control opens");
            continue;
        }
        let error = refusal("wraps.gguf", &bytes);
        assert!(matches!(error, Error::Overflow { .. }), "{dims:?}: {error}");
        says(&error, &["blk.0.attn_q.weight"]);
    }
    let error = refusal("packed.gguf", &Gguf::new().entry("w", &[32, 1 << 60], Q4_0, 0).data(32).build());
    assert!(matches!(error, Error::Overflow { .. }), "{error}");
}

/// ggml pull request 1517: a dimension of 0 divided by zero; 73 bytes were enough.
#[test]
fn ggml_1517_zero_dimension() {
    for dims in [vec![0], vec![4, 0], vec![0, 4], vec![1, 1, 0, 1]] {
        let error = refusal("zero.gguf", &Gguf::new().entry("w", &dims, F32, 0).build());
        assert!(matches!(error, Error::ZeroDimension { .. }), "{dims:?}: {error}");
        says(&error, &["\"w\"", "dimension of 0"]);
    }
    let header = r#"{"w":{"dtype":"F32","shape":[4,0],"data_offsets":[0,0]}}"#;
    assert!(matches!(refusal("zero.safetensors", &safetensors(header, &[])), Error::ZeroDimension { .. }));
}

/// llama.cpp pull request 24263: a key without characters was undefined behaviour.
#[test]
fn llama_cpp_24263_empty_key() {
    let error = refusal("key.gguf", &Gguf::new().key("", U32, &[0; 4]).build());
    assert!(matches!(error, Error::NameLength { length: 0, .. }), "{error}");
    let error = refusal("tensor.gguf", &Gguf::new().entry("", &[8], F32, 0).data(32).build());
    assert!(matches!(error, Error::NameLength { length: 0, .. }), "{error}");
}

/// llama.cpp issue 25378: the number of dimensions had no bound, and products of dimensions wrapped modulo 2^64.
#[test]
fn llama_cpp_25378_unbounded_dimensions() {
    for rank in [0usize, 5, 1000] {
        let error = refusal("rank.gguf", &Gguf::new().entry("w", &vec![1; rank], F32, 0).data(32).build());
        assert!(matches!(error, Error::Rank { found, .. } if found == rank as u64), "{rank}: {error}");
        says(&error, &["\"w\"", &rank.to_string(), "1 to 4"]);
    }
    // A rank that the file doesn't even have the dimensions for.
    let mut bytes = Gguf::new().entry("w", &[1], F32, 0).data(32).build();
    let rank_at = 24 + 8 + 1;
    bytes[rank_at..rank_at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(refusal("rank.gguf", &bytes), Error::Rank { found: 0xffff_ffff, .. }));
    let error =
        refusal("product.gguf", &Gguf::new().entry("w", &[4_194_305, 4_194_305, 211_106_198_978_564], F32, 0).build());
    assert!(matches!(error, Error::Overflow { .. }), "{error}");
}

/// gguf-tools issue 25: lengths of keys past the end of the file were followed, ranks above 8 written past an array.
#[test]
fn gguf_tools_25_reads_and_writes_out_of_bounds() {
    let sound = Gguf::new().key("general.name", STRING, &string("iron")).entry("w", &[8], F32, 0).data(32);
    let bytes = sound.build();
    open_bytes("sound.gguf", &bytes).expect("the control opens");
    let key_length = 24;
    for length in [bytes.len() as u64, u64::MAX, u64::MAX - 31, 1 << 63] {
        let mut bytes = bytes.clone();
        bytes[key_length..key_length + 8].copy_from_slice(&length.to_le_bytes());
        let error = refusal("length.gguf", &bytes);
        assert!(matches!(error, Error::Truncated { .. }), "{length}: {error}");
    }
    assert!(matches!(refusal("rank.gguf", &Gguf::new().entry("w", &[1; 9], F32, 0).build()), Error::Rank { .. }));
}

/// gguf-tools pull request 28: an alignment of 0 divided by zero; lengths were not compared with the file's size.
#[test]
fn gguf_tools_28_alignment_zero_and_every_cut() {
    for alignment in [0u32, 3, 24, u32::MAX] {
        let file =
            Gguf::new().key("general.alignment", U32, &alignment.to_le_bytes()).entry("w", &[8], F32, 0).data(32);
        let error = refusal("alignment.gguf", &file.build());
        assert!(matches!(error, Error::Alignment { .. }), "{alignment}: {error}");
        says(&error, &["general.alignment", &alignment.to_string(), "power of two"]);
    }
    let error = refusal("kind.gguf", &Gguf::new().key("general.alignment", STRING, &string("32")).build());
    assert!(matches!(error, Error::Alignment { .. }), "{error}");
    // A file that ends anywhere before its end.
    let array = [STRING.to_le_bytes().to_vec(), 2u64.to_le_bytes().to_vec(), string("a"), string("b")].concat();
    let bytes = Gguf::new().key("tokens", ARRAY, &array).entry("w", &[8], F32, 0).data(32).build();
    open_bytes("whole.gguf", &bytes).expect("the control opens");
    for end in 1..bytes.len() {
        refusal("cut.gguf", &bytes[..end]);
    }
}

/// safetensors issue 668: a header above 100 MB, of 1.3 million small tensors, was refused though the file is sound.
#[test]
fn safetensors_668_large_header() {
    // 101 MB of which most is spaces, so that the test stays fast.
    let mut header = String::from(r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#);
    header.push_str(&" ".repeat(101_000_000));
    let checkpoint = open_bytes("large.safetensors", &safetensors(&header, &[7])).expect("it's sound");
    assert_eq!(&checkpoint.tensor("w").expect("w is there").bytes[..], [7]);
}

/// safetensors issue 601: a file of metadata only was written with a broken header.
#[test]
fn safetensors_601_metadata_only() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("metadata.safetensors");
    let mut metadata = Metadata::new();
    metadata.insert("crc", "12");
    ironloom_weights::safetensors::write(&path, &metadata, vec![], &mut unwatched).expect("it's written");
    let checkpoint = ironloom_weights::open(&path).expect("it's read");
    assert_eq!(checkpoint.metadata().required_string("crc").expect("crc is there"), "12");
    assert_eq!(checkpoint.tensors().len(), 0);
}

const PAIR: &str =
    r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}}"#;

/// airllm issue 137: a download that stopped early gave an error without sizes.
#[test]
fn airllm_137_truncated_file() {
    let bytes = safetensors(PAIR, &[0; 12]);
    open_bytes("whole.safetensors", &bytes).expect("the control opens");
    for end in 1..bytes.len() {
        let error = refusal("cut.safetensors", &bytes[..end]);
        if end >= 9 {
            assert!(matches!(error, Error::Truncated { .. }), "{end}: {error}");
            says(&error, &[&format!("has {end};"), "download it again"]);
        }
    }
    let error = refusal("cut.safetensors", &bytes[..bytes.len() - 1]);
    says(&error, &["tensor \"b\"", &bytes.len().to_string()]);
}

/// InvokeAI issue 7009: a model put together from a finished and a cancelled download; one file of it was short.
#[test]
fn invokeai_7009_one_short_or_missing_shard() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name);
    let tensor = |name: &str| {
        let dtype = ironloom_weights::DType::U8;
        NewTensor::new(ironloom_weights::TensorInfo { name: name.into(), dtype, shape: [64].into() }, vec![1; 64])
    };
    let tensors = vec![tensor("first"), tensor("second")];
    ironloom_weights::safetensors::write_sharded(folder.path(), &Metadata::new(), tensors, 64, &mut unwatched)
        .expect("shards");
    ironloom_weights::open(folder.path()).expect("the control opens");
    let shard = at("model-00002-of-00002.safetensors");
    let bytes = std::fs::read(&shard).expect("the shard");
    std::fs::write(&shard, &bytes[..bytes.len() - 10]).expect("a short shard");
    let error = ironloom_weights::open(folder.path()).expect_err("a shard is short");
    says(&error, &["model-00002-of-00002.safetensors", "second", &bytes.len().to_string()]);
    std::fs::remove_file(&shard).expect("the shard goes");
    let error = ironloom_weights::open(folder.path()).expect_err("a shard is missing");
    assert!(matches!(error, Error::MissingShard { missing: 1, shards: 2, .. }), "{error}");
    says(&error, &["model.safetensors.index.json", "model-00002-of-00002.safetensors", "\"second\""]);
    // An index that names a tensor its shard doesn't have.
    std::fs::write(&shard, safetensors("{}", &[])).expect("an empty shard");
    let error = ironloom_weights::open(folder.path()).expect_err("a tensor is missing");
    says(&error, &["\"second\"", "model-00002-of-00002.safetensors", "no file has it"]);
    // Shards whose index was not downloaded.
    std::fs::remove_file(at("model.safetensors.index.json")).expect("the index goes");
    assert!(matches!(ironloom_weights::open(folder.path()), Err(Error::NoIndex { .. })));
}

/// ComfyUI issue 15602: files with bytes that belong to no tensor.
#[test]
fn comfyui_15602_trailing_bytes_gaps_and_overlaps() {
    let error = refusal("trailing.safetensors", &safetensors(PAIR, &[0; 13]));
    assert!(matches!(error, Error::Trailing { .. }), "{error}");
    says(&error, &["1 bytes too many"]);
    let gap = PAIR.replace("[8,12]", "[9,13]");
    assert!(matches!(
        refusal("gap.safetensors", &safetensors(&gap, &[0; 13])),
        Error::Gap { offset: 9, expected: 8, .. }
    ));
    let overlap = PAIR.replace("[8,12]", "[7,11]");
    let error = refusal("overlap.safetensors", &safetensors(&overlap, &[0; 12]));
    assert!(matches!(error, Error::Overlap { offset: 7, other_end: 8, .. }), "{error}");
    says(&error, &["\"a\"", "\"b\""]);
    let backwards = PAIR.replace("[8,12]", "[12,8]");
    assert!(matches!(refusal("backwards.safetensors", &safetensors(&backwards, &[0; 12])), Error::DataLength { .. }));

    let sound = Gguf::new().entry("a", &[9], F32, 0).entry("b", &[8], F32, 64).data(96);
    open_bytes("sound.gguf", &sound.build()).expect("the control opens");
    let trailing = refusal("trailing.gguf", &[sound.build(), vec![0]].concat());
    assert!(matches!(trailing, Error::Trailing { .. }), "{trailing}");
    let overlap = Gguf::new().entry("a", &[9], F32, 0).entry("b", &[8], F32, 32).data(64).build();
    assert!(matches!(refusal("overlap.gguf", &overlap), Error::Overlap { .. }));
    let gap = Gguf::new().entry("a", &[9], F32, 0).entry("b", &[8], F32, 96).data(128).build();
    assert!(matches!(refusal("gap.gguf", &gap), Error::Gap { offset: 96, expected: 64, .. }));
}

/// ComfyUI issue 9085 (`HeaderTooLarge`): the file under a model's name was something else.
#[test]
fn comfyui_9085_something_else_in_place_of_weights() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:b179c952\nsize 98362432\n";
    for (bytes, parts) in [
        (&b"<!DOCTYPE html>\n<html><body>Sign in</body></html>"[..], &["web page", "download it again"][..]),
        (pointer.as_bytes(), &["Git LFS pointer", "98362432", "git lfs pull"]),
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl", &["zip", "convert it to safetensors"]),
        (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", &["pickle", "convert it to safetensors"]),
        (br#"{"error": "Repository not found"}"#, &["JSON"]),
        (b"tjgg\x03\x00\x00\x00 and more", &["before GGUF", "convert the model again"]),
        (b"nothing that anybody knows", &["starts with [6e, 6f"]),
        (b"GG", &["neither GGUF"]),
    ] {
        for name in ["model.safetensors", "model.gguf"] {
            says(&refusal(name, bytes), parts);
        }
    }
    says(&refusal("model.gguf", b""), &["empty", "0 bytes"]);
}

/// ComfyUI issue 3225 (`MetadataIncompleteBuffer`): a header that promises more than the file has.
#[test]
fn comfyui_3225_header_longer_than_the_file() {
    let mut bytes = safetensors(PAIR, &[0; 12]);
    for length in [bytes.len() as u64, 1 << 40, u64::MAX] {
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        let error = refusal("model.safetensors", &bytes);
        assert!(matches!(error, Error::Truncated { place: Place::Part("the header"), .. }), "{length}: {error}");
    }
}
