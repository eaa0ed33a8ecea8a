//! What a configuration is read as, and what is refused of one, by line and key.

use ironloom_lm::{Architecture, FeedForwardConfig};

use super::*;

const SMALL: &str = "output = 'out'
[model]
width = 64
layers = 2
heads = 4
[tokenizer]
train = { vocab_size = 300 }
[[data]]
paths = ['a.txt']
[batch]
sequence_length = 16
rows = 2
[training]
steps = 10
schedule = { kind = 'wsd', decay_steps = 3 }
optimizer = { kind = 'muon', momentum = 0.9 }
";

fn refused(text: &str) -> String {
    let error = TrainConfig::parse(text, "c.toml").unwrap_err();
    format!("{error:#}")
}

#[test]
fn a_configuration_is_read_with_its_defaults() {
    let mut config = TrainConfig::parse(SMALL, "c.toml").unwrap();
    assert_eq!((config.training.steps, config.checkpoints.keep, config.batch.accumulate), (10, 2, 1));
    assert_eq!(config.training.optimizer.name(), "muon");
    let described = config.model.describe(300, 16).unwrap();
    assert_eq!((described.head_width, described.kv_heads, described.context_length), (16, 4, 16));
    config.resolve(Path::new("runs"));
    assert_eq!((config.output.as_path(), &config.data[0].paths[0]), (Path::new("runs/out"), &"runs/a.txt".into()));
}

#[test]
fn paths_are_those_of_the_file_without_detours() {
    let paths =
        [("runs", "../a"), ("", "../a"), ("x/runs", "../../../a"), ("..", "../a"), ("runs", "/a/../b"), ("runs", "..")];
    let expected = ["a", "../a", "../a", "../../a", "/a/../b", "."];
    assert_eq!(paths.map(|(folder, path)| below(Path::new(folder), Path::new(path))), expected.map(PathBuf::from));
}

#[test]
fn a_wrong_value_or_key_is_named_with_its_line() {
    for (from, to, line, parts) in [
        ("layers = 2", "layers = 'two'", 4, &["invalid type", "layers = 'two'"][..]),
        ("heads = 4", "heds = 4", 5, &["unknown field `heds`", "`heads`"]),
        ("steps = 10", "steps = -1", 14, &["steps = -1"]),
        ("momentum", "momentun", 16, &["momentun"]),
        ("'wsd'", "'linear'", 15, &["linear", "warmup_cosine"]),
        ("rows = 2", "rows = ", 12, &["rows ="]),
    ] {
        let message = refused(&SMALL.replace(from, to));
        assert!(message.starts_with(&format!("c.toml:{line}: ")), "{message}");
        parts.iter().for_each(|part| assert!(message.contains(part), "{part} is not in {message}"));
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    for (from, to, part) in [
        ("width = 64", "width = 64\npreset = 'moe-55m'", "needs one of preset, from"),
        ("width = 64\n", "", "width, layers and heads together"),
        ("width = 64\nlayers = 2\nheads = 4", "preset = 'moe-55m'\nkv_heads = 2", "model.kv_heads belongs"),
        ("width = 64\nlayers = 2\nheads = 4", "from = 'model'", "[tokenizer] is of no use"),
        ("[tokenizer]\ntrain = { vocab_size = 300 }", "", "needs a [tokenizer]"),
        ("train = { vocab_size = 300 }", "", "either path or train"),
    ] {
        assert_ne!(SMALL, SMALL.replace(from, to));
        let message = refused(&SMALL.replace(from, to));
        assert!(message.contains(part), "{part} is not in {message}");
    }
}

#[test]
fn experts_follow_the_dense_layers() {
    let experts = "heads = 4\nexperts = { count = 4, per_row = 2, width = 32, shared_width = 32, dense_layers = 1 }";
    let config = TrainConfig::parse(&SMALL.replace("heads = 4", experts), "c.toml").unwrap();
    let described = config.model.describe(300, 16).unwrap();
    assert_eq!(described.architecture, Architecture::Ernie45Moe);
    assert!(matches!(described.layers[0].feed_forward, FeedForwardConfig::Dense { .. }));
    assert!(matches!(described.layers[1].feed_forward, FeedForwardConfig::Routed));
    let odd = experts.replace("shared_width = 32", "shared_width = 48");
    let config = TrainConfig::parse(&SMALL.replace("heads = 4", &odd), "c.toml").unwrap();
    assert_eq!(config.model.describe(300, 16).unwrap().architecture, Architecture::IronloomMoe);
    let none = experts.replace("shared_width = 32", "shared_width = 0");
    let config = TrainConfig::parse(&SMALL.replace("heads = 4", &none), "c.toml").unwrap();
    assert_eq!(config.model.describe(300, 16).unwrap().experts.unwrap().shared, None);
    let config = TrainConfig::parse(&SMALL.replace("heads = 4", &experts.replace("layers = 1", "layers = 2")), "");
    assert!(config.unwrap().model.describe(300, 16).is_err());
}

#[test]
fn keys_of_another_format_are_refused() {
    let with = |keys: &str| {
        let text = SMALL.replace("paths = ['a.txt']", &format!("paths = ['a.txt']\n{keys}"));
        TrainConfig::parse(&text, "c.toml").unwrap().data[0].source()
    };
    let source = with("format = 'json-text'\nfield = 'body'").unwrap();
    assert_eq!(source.format, SourceFormat::JsonText { field: "body".into() });
    assert!(with("format = 'chat'\nfield = 'body'").unwrap_err().to_string().contains("`field`"));
    assert!(with("format = 'chat'\nanswers = 'last'").is_ok());
}
