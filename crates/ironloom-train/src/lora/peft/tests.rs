//! Adapters as peft itself wrote them, and ours read again.

use ironloom_core::Shape;

use super::*;

/// As peft 0.21.2 wrote it, from `tests/golden/training_runs.py`.
fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/training/adapters/llama").join(name)
}

fn adapter() -> LoraAdapter {
    let options =
        LoraOptions { rank: 2, alpha: 3.5, dropout: 0.05, targets: vec!["q_proj".into()], ..Default::default() };
    let mut layers: Vec<LoraMatrices> =
        (0..3).map(|i| LoraMatrices::new(&format!("model.layers.{i}.self_attn.q_proj"), 3, 5, 2, 1)).collect();
    layers[1].b.fill(0.25);
    LoraAdapter { options, base_model: Some("some/model".into()), layers }
}

/// The adapter's folder with its configuration changed.
fn changed(change: impl Fn(&mut Map<String, Value>)) -> crate::Result<LoraAdapter> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden("trained").join(WEIGHTS_FILE), folder.path().join(WEIGHTS_FILE)).unwrap();
    let mut config = serde_json::from_slice(&std::fs::read(golden("trained").join(CONFIG_FILE)).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(folder.path().join(CONFIG_FILE), serde_json::to_vec(&config).unwrap()).unwrap();
    load(folder.path())
}

/// A folder of the golden configuration and these tensors.
fn with_tensors(tensors: &[(&str, DType, &[usize])]) -> crate::Result<LoraAdapter> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden("trained").join(CONFIG_FILE), folder.path().join(CONFIG_FILE)).unwrap();
    let tensors = tensors.iter().map(|(name, dtype, shape)| {
        let info =
            TensorInfo { name: format!("base_model.model.{name}"), dtype: *dtype, shape: Shape::new(shape).unwrap() };
        let bytes = vec![0; info.bytes().unwrap()];
        NewTensor::new(info, bytes)
    });
    safetensors::write(folder.path().join(WEIGHTS_FILE), &Metadata::new(), tensors.collect(), &mut unwatched).unwrap();
    load(folder.path())
}

#[test]
fn what_peft_wrote_is_read() {
    let read = load(golden("trained")).unwrap();
    let mut targets = read.options.targets.clone();
    targets.sort();
    assert_eq!(targets, ["down_proj", "q_proj", "v_proj"]);
    assert_eq!((read.options.rank, read.options.alpha, read.options.scale()), (4, 8.0, 2.0));
    assert_eq!((read.options.dropout, read.options.rank_stabilized, read.base_model.as_deref()), (0.0, false, None));
    let names: Vec<&str> = read.layers.iter().map(|layer| layer.layer.as_str()).collect();
    assert!(names.contains(&"model.layers.0.self_attn.q_proj") && names.contains(&"model.layers.0.mlp.down_proj"));
    assert_eq!(names.len() % 3, 0);
    for layer in &read.layers {
        assert_eq!((layer.a.len(), layer.b.len()), (4 * layer.inputs, layer.outputs * 4));
        assert!(layer.a.iter().any(|&value| value != 0.0) && layer.b.iter().any(|&value| value != 0.0));
    }
    assert_ne!(read.layers, load(golden("initial")).unwrap().layers);
}

#[test]
fn what_is_written_again_has_pefts_tensors_byte_for_byte() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &load(golden("trained")).unwrap()).unwrap();
    let ours = ironloom_weights::open(folder.path().join(WEIGHTS_FILE)).unwrap();
    let theirs = ironloom_weights::open(golden("trained").join(WEIGHTS_FILE)).unwrap();
    assert_eq!(ours.tensors().count(), theirs.tensors().count());
    for info in theirs.tensors() {
        let (ours, theirs) = (ours.tensor(&info.name).unwrap(), theirs.tensor(&info.name).unwrap());
        assert_eq!((ours.dtype, &ours.shape, &ours.bytes[..]), (theirs.dtype, &theirs.shape, &theirs.bytes[..]));
    }
    // And every field that is written has the value that peft gave it.
    let read = |path: PathBuf| serde_json::from_slice::<Map<String, Value>>(&std::fs::read(path).unwrap()).unwrap();
    let (ours, theirs) = (read(folder.path().join(CONFIG_FILE)), read(golden("trained").join(CONFIG_FILE)));
    for (field, value) in &ours {
        assert_eq!(Some(value), theirs.get(field), "{field}");
    }
}

#[test]
fn what_was_saved_is_read_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let adapter = adapter();
    save(folder.path().join("new/folder"), &adapter).unwrap();
    assert_eq!(load(folder.path().join("new/folder")).unwrap(), adapter);
    let stabilized = LoraOptions { rank_stabilized: true, ..adapter.options.clone() };
    let adapter = LoraAdapter { options: stabilized, base_model: None, ..adapter };
    save(folder.path(), &adapter).unwrap();
    assert_eq!(load(folder.path()).unwrap(), adapter);
}

#[test]
fn patterns_are_written_as_the_layers_they_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut adapter = adapter();
    for pattern in ["all-linear", "model.*.q_proj"] {
        adapter.options.targets = vec![pattern.to_owned()];
        save(folder.path(), &adapter).unwrap();
        let targets = load(folder.path()).unwrap().options.targets;
        assert_eq!(targets, adapter.layers.iter().map(|layer| layer.layer.clone()).collect::<Vec<_>>());
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    assert!(changed(|_| ()).is_ok());
    for (field, value) in [
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("bias", json!("lora_only")),
        ("lora_bias", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("rank_pattern", json!({"q_proj": 8})),
        ("alpha_pattern", json!({"q_proj": 8})),
        ("fan_in_fan_out", json!(true)),
        ("use_qalora", json!(true)),
        ("layer_replication", json!([[0, 4], [2, 5]])),
        ("trainable_token_indices", json!([1, 2])),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
        ("alora_invocation_tokens", json!([5])),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("init_lora_weights", json!("olora")),
        ("task_type", json!("SEQ_CLS")),
        ("something_of_next_year", json!(0.5)),
    ] {
        let error = changed(|config| drop(config.insert(field.into(), value.clone()))).unwrap_err();
        let Error::Lora(LoraError::Unsupported { field: named, .. }) = &error else { panic!("{field}: {error}") };
        assert_eq!(named, field);
        assert!(error.to_string().contains(&value.to_string()), "{error}");
    }
    // A field that a later version adds, switched off, changes nothing.
    assert!(changed(|config| drop(config.insert("something_of_next_year".into(), json!(null)))).is_ok());
    assert!(changed(|config| drop(config.insert("init_lora_weights".into(), json!("gaussian")))).is_ok());
    let stabilized = changed(|config| drop(config.insert("use_rslora".into(), json!(true)))).unwrap();
    assert_eq!(stabilized.options.scale(), 4.0);
}

#[test]
fn fields_that_mean_nothing_are_refused_by_name() {
    for (field, value) in [
        ("peft_type", json!("LOHA")),
        ("peft_type", json!(null)),
        ("r", json!(0)),
        ("r", json!(2.5)),
        ("r", json!(1e12)),
        ("r", json!("8")),
        ("lora_alpha", json!(null)),
        ("lora_dropout", json!("none")),
        ("use_rslora", json!(1)),
        ("target_modules", json!([1])),
        ("target_modules", json!({})),
        ("base_model_name_or_path", json!(1)),
    ] {
        let error = changed(|config| drop(config.insert(field.into(), value.clone()))).unwrap_err();
        assert!(matches!(&error, Error::Lora(LoraError::Field { field: named, .. }) if *named == field), "{error}");
    }
    for (field, value) in [("lora_alpha", json!(-1)), ("lora_dropout", json!(1.0))] {
        let error = changed(|config| drop(config.insert(field.into(), value.clone()))).unwrap_err();
        assert!(matches!(&error, Error::Lora(LoraError::InvalidOption { .. })), "{error}");
    }
    let error = changed(|config| drop(config.insert("r".into(), json!(8)))).unwrap_err();
    assert!(matches!(error, Error::Lora(LoraError::Shape { rank: 8, .. })));
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let (a, b) = (("m.q.lora_A.weight", DType::F32, &[4, 6][..]), ("m.q.lora_B.weight", DType::BF16, &[3, 4][..]));
    let read = with_tensors(&[a, b]).unwrap();
    assert_eq!((read.layers[0].layer.as_str(), read.layers[0].inputs, read.layers[0].outputs), ("m.q", 6, 3));
    let lora = |result: crate::Result<LoraAdapter>| match result {
        Err(Error::Lora(error)) => error,
        other => panic!("{other:?}"),
    };
    assert!(matches!(lora(with_tensors(&[a])), LoraError::Unpaired { missing: "lora_B", .. }));
    assert!(matches!(lora(with_tensors(&[b])), LoraError::Unpaired { missing: "lora_A", .. }));
    assert!(matches!(lora(with_tensors(&[])), LoraError::Empty { .. }));
    for name in ["m.q.lora_magnitude_vector", "m.embed_tokens.lora_embedding_A", ".lora_A.weight", "m.norm.weight"] {
        let error = lora(with_tensors(&[a, b, (name, DType::F32, &[4, 6])]));
        assert!(matches!(error, LoraError::UnknownTensor { .. }), "{error}");
    }
    for (shape_a, shape_b) in [(&[6, 4][..], &[3, 4][..]), (&[4, 6], &[4, 3]), (&[4, 6, 1], &[3, 4]), (&[4, 6], &[12])]
    {
        let error = lora(with_tensors(&[(a.0, a.1, shape_a), (b.0, b.1, shape_b)]));
        assert!(matches!(error, LoraError::Shape { rank: 4, .. }), "{error}");
    }
    assert!(matches!(lora(with_tensors(&[(a.0, DType::I32, a.2), b])), LoraError::Type { .. }));
}

#[test]
fn folders_without_an_adapter_are_said_to_be() {
    let folder = tempfile::tempdir().unwrap();
    assert!(load(folder.path()).unwrap_err().to_string().contains(CONFIG_FILE));
    std::fs::copy(golden("trained").join(CONFIG_FILE), folder.path().join(CONFIG_FILE)).unwrap();
    assert!(load(folder.path()).unwrap_err().to_string().contains(WEIGHTS_FILE));
    std::fs::write(folder.path().join("adapter_model.bin"), b"").unwrap();
    assert!(load(folder.path()).unwrap_err().to_string().contains("adapter_model.bin"));
    std::fs::copy(golden("trained").join(WEIGHTS_FILE), folder.path().join(WEIGHTS_FILE)).unwrap();
    std::fs::write(folder.path().join(CONFIG_FILE), b"[1]").unwrap();
    assert!(matches!(load(folder.path()), Err(Error::Lora(LoraError::Config { .. }))));
}

#[test]
fn matrices_of_another_size_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut adapter = adapter();
    adapter.layers[2].b.pop();
    let error = save(folder.path(), &adapter).unwrap_err();
    assert!(matches!(&error, Error::Lora(LoraError::Length { matrix: "B", expected: 6, found: 5, .. })), "{error}");
    assert!(!folder.path().join(CONFIG_FILE).exists());
}
