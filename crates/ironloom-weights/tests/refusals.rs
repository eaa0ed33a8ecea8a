//! What is refused beside the public cases of `tests/regressions`, and what must not be: each message names file, tensor or
//! key, what was expected and what was found.

mod forge;

use std::fs;

use forge::{ARRAY, BOOL, F32, Gguf, Q4_0, STRING, U8, U32, open_bytes, refusal, safetensors, says, string};
use ironloom_weights::{Error, Format, Place};

#[test]
fn versions_and_byte_orders() {
    let mut file = Gguf::new().entry("w", &[8], F32, 0).data(32);
    for version in [2, 3] {
        file.version = version;
        assert_eq!(open_bytes("model.gguf", &file.build()).unwrap().format(), Format::Gguf { version });
    }
    for version in [0, 1, 4, 77] {
        file.version = version;
        assert!(
            matches!(refusal("old.gguf", &file.build()), Error::Version { version: found, .. } if found == version)
        );
    }
    file.version = 3u32.swap_bytes();
    says(&refusal("big.gguf", &file.build()), &["big-endian", "convert the model again"]);
    let mut bytes = Gguf::new().build();
    bytes[..4].copy_from_slice(b"FUGG");
    assert!(matches!(refusal("big.gguf", &bytes), Error::BigEndian { .. }));
}

#[test]
fn gguf_types_names_and_offsets() {
    let error = refusal("type.gguf", &Gguf::new().entry("w", &[32], 23, 0).data(32).build());
    says(&error, &["\"w\"", "23 (IQ4_XS)", "Q4_K"]);
    let error = refusal("type.gguf", &Gguf::new().entry("w", &[32], 4711, 0).data(32).build());
    says(&error, &["\"w\"", "4711"]);
    let error = refusal("block.gguf", &Gguf::new().entry("w", &[33, 32], Q4_0, 0).data(32).build());
    says(&error, &["\"w\"", "rows of 33", "Q4_0 packs 32"]);
    let twice = Gguf::new().entry("w", &[8], F32, 0).entry("w", &[8], F32, 32).data(64).build();
    assert!(matches!(refusal("twice.gguf", &twice), Error::DuplicateTensor { .. }));
    let askew = Gguf::new().entry("w", &[8], F32, 8).data(64).build();
    assert!(matches!(refusal("askew.gguf", &askew), Error::Misaligned { offset: 8, alignment: 32, .. }));
    let beyond = Gguf::new().entry("w", &[8], F32, 1 << 40).data(32).build();
    assert!(matches!(refusal("beyond.gguf", &beyond), Error::Gap { .. }));
    let last = Gguf::new().entry("w", &[8], F32, u64::MAX - 31).data(32).build();
    assert!(matches!(refusal("last.gguf", &last), Error::Overflow { .. } | Error::Gap { .. }));
    let short = Gguf::new().entry("v", &[8], F32, 0).entry("w", &[800], F32, 32).data(64).build();
    let error = refusal("short.gguf", &short);
    says(&error, &["tensor \"w\"", "3,328 bytes", "download it again"]);
}

/// The order of the table is not the order of the data in every file.
#[test]
fn gguf_tables_may_list_tensors_in_any_order() {
    let bytes = Gguf::new().entry("second", &[8], F32, 64).entry("first", &[9], F32, 0).data(96).build();
    let checkpoint = open_bytes("order.gguf", &bytes).unwrap();
    assert_eq!(checkpoint.tensor("first").unwrap().bytes.len(), 36);
    assert_eq!(checkpoint.unused(), ["second"]);
    let shape = Gguf::new().entry("w", &[8, 2, 3], F32, 0).data(192).build();
    assert_eq!(open_bytes("shape.gguf", &shape).unwrap().info("w").unwrap().shape.dims(), [3, 2, 8]);
}

#[test]
fn gguf_metadata() {
    let error = refusal("twice.gguf", &Gguf::new().key("k", U8, &[1]).key("k", U8, &[1]).build());
    assert!(matches!(error, Error::DuplicateKey { .. }));
    says(&refusal("kind.gguf", &Gguf::new().key("k", 13, &[1]).build()), &["\"k\"", "13", "0 to 12"]);
    says(&refusal("bool.gguf", &Gguf::new().key("k", BOOL, &[2]).build()), &["\"k\"", "2"]);
    let bad_text = [2u64.to_le_bytes().to_vec(), vec![0xc3, 0x28]].concat();
    let error = refusal("text.gguf", &Gguf::new().key("k", STRING, &bad_text).build());
    assert!(matches!(error, Error::NotUtf8 { element: None, .. }));
    // The halves of one character in two strings are valid together and not alone.
    let halves = [STRING.to_le_bytes().to_vec(), 3u64.to_le_bytes().to_vec(), string("fine")].concat();
    let half = |byte: u8| [1u64.to_le_bytes().to_vec(), vec![byte]].concat();
    let error =
        refusal("halves.gguf", &Gguf::new().key("k", ARRAY, &[halves, half(0xc3), half(0xa9)].concat()).build());
    assert!(matches!(&error, Error::NotUtf8 { place: Place::Key(key), element: Some(1), .. } if key == "k"), "{error}");
    let nested = |depth: usize| {
        let mut bytes = Vec::new();
        for _ in 1..depth {
            bytes.extend([ARRAY.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat());
        }
        bytes.extend([U8.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec(), vec![5]].concat());
        Gguf::new().key("k", ARRAY, &bytes).build()
    };
    open_bytes("nested.gguf", &nested(4)).unwrap();
    assert!(matches!(refusal("nested.gguf", &nested(5)), Error::Nesting { limit: 4, .. }));
    assert!(matches!(refusal("nested.gguf", &nested(5000)), Error::Nesting { .. }));
    let split = Gguf::new().key("split.count", U32, &3u32.to_le_bytes()).build();
    says(&refusal("part.gguf", &split), &["3 GGUF files", "--merge"]);
}

#[test]
fn safetensors_headers() {
    for (header, parts) in [
        (r#"{"w":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}"#, &["\"w\"", "F8_E4M3", "BF16"][..]),
        (r#"{"w":{"dtype":"Q4_0","shape":[4],"data_offsets":[0,4]}}"#, &["\"w\"", "Q4_0"]),
        (r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, &["\"w\"", "F32 [2] (8 bytes)", "span 4"]),
        (r#"{"w":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}"#, &["\"w\"", "-4"]),
        (r#"{"w":{"dtype":"U8","shape":[1,1,1,1,1,1,4],"data_offsets":[0,4]}}"#, &["\"w\"", "7 dimensions", "0 to 6"]),
        (r#"{"w":{"shape":[4],"data_offsets":[0,4]}}"#, &["\"w\"", "dtype"]),
        (r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{}}"#, &["\"w\""]),
        (r#"{"__metadata__":{"a":1},"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, &["__metadata__"]),
        (r#"{"":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, &["name of 0 bytes"]),
        (r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#, &["header", "column"]),
    ] {
        says(&refusal("model.safetensors", &safetensors(header, &[0; 4])), parts);
    }
    let twice =
        r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
    assert!(matches!(refusal("twice.safetensors", &safetensors(twice, &[0; 8])), Error::DuplicateTensor { .. }));
    let scalar = r#"{"w":{"dtype":"F64","shape":[],"data_offsets":[0,8],"more":[{}]}}"#;
    let checkpoint = open_bytes("scalar.safetensors", &safetensors(scalar, &[0; 8])).unwrap();
    assert_eq!(checkpoint.info("w").unwrap().shape.rank(), 0);
    let deep = format!("{{\"w\":{}", "[".repeat(100_000));
    assert!(matches!(refusal("deep.safetensors", &safetensors(&deep, &[])), Error::Header { .. }));
}

#[test]
fn indexes() {
    let folder = tempfile::tempdir().unwrap();
    let index = folder.path().join("model.safetensors.index.json");
    let one =
        |name: &str| safetensors(&format!(r#"{{"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#), &[1]);
    fs::write(folder.path().join("a.safetensors"), one("a")).unwrap();
    fs::write(folder.path().join("b.safetensors"), one("b")).unwrap();
    let open = |text: &str| {
        fs::write(&index, text).unwrap();
        ironloom_weights::open(folder.path())
    };
    open(r#"{"metadata":{"total_size":2},"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}"#).unwrap();
    let error = open(r#"{"weight_map":{"a":"a.safetensors","b":"a.safetensors"}}"#).unwrap_err();
    assert!(matches!(error, Error::IndexedTensor { found_in: None, .. }), "{error}");
    let error = open(r#"{"weight_map":{"a":"b.safetensors","b":"a.safetensors"}}"#).unwrap_err();
    says(&error, &["\"a\"", "in b.safetensors", "in a.safetensors"]);
    let error = open(r#"{"weight_map":{"a":"a.safetensors","a":"a.safetensors"}}"#).unwrap_err();
    assert!(matches!(error, Error::DuplicateTensor { .. }), "{error}");
    for shard in ["../a.safetensors", "/etc/hostname", "..", "", "sub\\\\a.safetensors", "sub/a.safetensors"] {
        let error = open(&format!(r#"{{"weight_map":{{"a":"{shard}"}}}}"#)).unwrap_err();
        assert!(matches!(error, Error::ShardName { .. }), "{shard}: {error}");
    }
    for text in [r#"{"metadata":{}}"#, "[]", r#"{"weight_map":[]}"#, r#"{"weight_map":{"a":1}}"#, "{"] {
        assert!(matches!(open(text), Err(Error::Index { .. })), "{text}");
    }
    assert!(matches!(open("<html>"), Err(Error::NotWeights { .. })));
    // The same tensor in two shards: which one counts, nobody can say.
    fs::write(folder.path().join("b.safetensors"), one("a")).unwrap();
    let error = open(r#"{"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}"#).unwrap_err();
    assert!(matches!(error, Error::IndexedTensor { .. } | Error::DuplicateTensor { .. }), "{error}");
}

#[test]
fn folders() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    assert!(matches!(ironloom_weights::open(folder.path()), Err(Error::NoWeights { found: None, .. })));
    fs::write(at("pytorch_model.bin"), b"PK\x03\x04").unwrap();
    says(&ironloom_weights::open(folder.path()).unwrap_err(), &["pytorch_model.bin", "convert it to safetensors"]);
    fs::write(at("config.json"), "{}").unwrap();
    fs::write(at("one.gguf"), Gguf::new().entry("w", &[8], F32, 0).data(32).build()).unwrap();
    let checkpoint = ironloom_weights::open(folder.path()).unwrap();
    assert_eq!((checkpoint.path(), checkpoint.file_bytes()), (folder.path(), 96));
    assert!(checkpoint.folder_file("config.json").unwrap().is_none(), "GGUF holds everything itself");
    fs::write(at("two.gguf"), "").unwrap();
    says(&ironloom_weights::open(folder.path()).unwrap_err(), &["one.gguf", "two.gguf"]);

    let one = safetensors(r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, &[1]);
    fs::write(at("weights.safetensors"), &one).unwrap();
    fs::write(at("tokenizer.json"), "version https://git-lfs.github.com/spec/v1\nsize 9\n").unwrap();
    let checkpoint = ironloom_weights::open(folder.path()).unwrap();
    assert_eq!(checkpoint.format(), Format::Safetensors);
    assert_eq!(checkpoint.folder_file("config.json").unwrap().unwrap(), b"{}");
    assert!(checkpoint.folder_file("generation_config.json").unwrap().is_none());
    says(&checkpoint.folder_file("tokenizer.json").unwrap_err(), &["tokenizer.json", "git lfs pull"]);
    for name in ["../config.json", "/etc/hostname", "", "a/b"] {
        assert!(matches!(checkpoint.folder_file(name), Err(Error::FileName { .. })), "{name}");
    }
    assert!(matches!(ironloom_weights::open(at("nowhere")), Err(Error::Read { .. })));
}

#[test]
fn a_file_is_what_it_holds() {
    let gguf = Gguf::new().entry("w", &[8], F32, 0).data(32).build();
    assert!(matches!(open_bytes("model.safetensors", &gguf).unwrap().format(), Format::Gguf { .. }));
    let one = safetensors(r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, &[1]);
    assert_eq!(open_bytes("model", &one).unwrap().format(), Format::Safetensors);
}

#[test]
fn a_missing_tensor_names_its_neighbours() {
    let names = ["blk.0.attn_q.weight", "blk.0.attn_k.weight", "output.weight", "token_embd.weight"];
    let file = (0..).zip(names).fold(Gguf::new(), |file, (i, name)| file.entry(name, &[8], F32, 32 * i)).data(128);
    let checkpoint = open_bytes("model.gguf", &file.build()).unwrap();
    let error = checkpoint.tensor("blk.0.attn_v.weight").unwrap_err();
    says(&error, &["model.gguf", "blk.0.attn_v.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight"]);
    assert_eq!(checkpoint.unused().len(), 4, "asking in vain uses nothing");
}
