//! The embedded images hold the kernels that the launchers ask for: every one, in the machine code of every architecture and
//! in the assembly for later cards; those for Hopper alone, in its machine code. No device is needed; without `nvcc` at build time there are no images, and nothing to see.
//!
//! What an image holds is read from its fatbin: a container of ELF files, one an architecture, whose sections `.text.NAME` are
//! the kernels. What launchers ask for is read from their source, by a rule that is part of the house style: in a file that
//! calls `Gpu::function`, a string in lower case with an underscore is the name of an image or of a kernel, spelled out or put
//! together by a macro's `concat!($name, "_ending")`; an operation's name for people has spaces. Both ways are checked, so that
//! a kernel without a launcher is found too, and a test shows that a kernel missing for any one target is noticed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use ironloom_kernels::images;

/// What an image holds for one target: an architecture's number, or `ptx`.
type Kernels = BTreeMap<String, BTreeSet<String>>;

/// The targets of a build that nothing narrows.
const TARGETS: [&str; 4] = ["80", "86", "90", "ptx"];
/// How the names of images end whose kernels are in the machine code of Hopper alone, and the target that has it.
const HOPPER: (&str, &str) = ("_hopper", "90");
/// Starts of names that a macro can put together and nobody asks for: weights in tiles have products of their own.
const NEVER_ASKED: &str = "linear_tiles_";

#[test]
fn every_image_has_every_architecture() {
    let wanted: BTreeSet<String> = match option_env!("IRONLOOM_CUDA_ARCHS") {
        Some(list) => list.split(',').map(|number| number.trim().to_owned()).chain(["ptx".to_owned()]).collect(),
        None => TARGETS.map(str::to_owned).into(),
    };
    for (image, kernels) in embedded() {
        assert_eq!(kernels.keys().cloned().collect::<BTreeSet<_>>(), wanted, "{image}");
        let all: BTreeSet<&String> = kernels.values().flatten().collect();
        for (target, names) in &kernels {
            if !is_for(&image, target) {
                assert!(names.is_empty(), "{image} for {target} holds {names:?}");
                continue;
            }
            let missing: Vec<_> = all.iter().filter(|name| !names.contains(**name)).collect();
            assert!(missing.is_empty(), "{image} for {target} lacks {missing:?}");
        }
    }
}

#[test]
fn launchers_ask_for_what_the_images_hold_and_for_all_of_it() {
    let (images, launchers) = (embedded(), launchers());
    if images.is_empty() {
        println!("skipped: built without nvcc, no kernel is embedded");
        return;
    }
    let faults = faults(&images, &launchers);
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn a_kernel_missing_for_one_architecture_is_noticed() {
    let (images, launchers) = (embedded(), launchers());
    for (image, kernels) in &images {
        for (target, names) in kernels {
            for name in names {
                let mut less = images.clone();
                less.get_mut(image).unwrap().get_mut(target).unwrap().remove(name);
                assert!(!faults(&less, &launchers).is_empty(), "{name} was taken from {image} for {target}");
            }
        }
    }
}

/// Whether an image holds kernels for a target.
fn is_for(image: &str, target: &str) -> bool {
    !image.ends_with(HOPPER.0) || target == HOPPER.1
}

/// What the crate embeds, by image and target.
fn embedded() -> BTreeMap<String, Kernels> {
    let of_image = |image: &ironloom_kernels::Image| {
        let mut kernels: Kernels = machine_code(image.fatbin);
        kernels.insert("ptx".to_owned(), image.assembly.iter().map(|&name| name.to_owned()).collect());
        (image.name.to_owned(), kernels)
    };
    images().iter().map(of_image).collect()
}

/// The ELF files of a fatbin. Its layout is not documented, and has been this since CUDA 9: a header of 16 bytes (magic number,
/// version u16, header's size u16, size of the rest u64), then parts, each with a header (kind u16: 1 for PTX and 2 for ELF,
/// version u16, header's size u32, payload's size u64, at byte 28 the architecture u32) and its payload.
fn machine_code(fatbin: &[u8]) -> Kernels {
    assert_eq!(number(fatbin, 0, 4), 0xba55_ed50, "not a fatbin");
    let mut kernels = Kernels::new();
    let mut at = number(fatbin, 6, 2);
    let end = at + number(fatbin, 8, 8);
    while at < end {
        let (kind, header, size) = (number(fatbin, at, 2), number(fatbin, at + 4, 4), number(fatbin, at + 8, 8));
        if kind == 2 {
            let architecture = number(fatbin, at + 28, 4).to_string();
            kernels.insert(architecture, code_sections(&fatbin[at + header..][..size]));
        }
        at += header + size;
    }
    kernels
}

/// The names behind `.text.` of a 64-bit ELF file's sections.
fn code_sections(elf: &[u8]) -> BTreeSet<String> {
    assert!(elf.starts_with(b"\x7fELF"), "machine code is compressed: it cannot be looked into");
    let (table, entry, count) = (number(elf, 0x28, 8), number(elf, 0x3a, 2), number(elf, 0x3c, 2));
    let header = |index: usize| table + index * entry;
    let names = number(elf, header(number(elf, 0x3e, 2)) + 24, 8);
    let name = |index: usize| {
        let text = &elf[names + number(elf, header(index), 4)..];
        let length = text.iter().position(|&byte| byte == 0).expect("a name has an end");
        String::from_utf8_lossy(&text[..length]).into_owned()
    };
    (0..count).filter_map(|index| name(index).strip_prefix(".text.").map(str::to_owned)).collect()
}

/// A little-endian number of `size` bytes.
fn number(bytes: &[u8], at: usize, size: usize) -> usize {
    bytes[at..at + size].iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte))
}

/// A source file that launches kernels.
struct Launcher {
    file: String,
    /// Every string in it that may be a name.
    names: BTreeSet<String>,
    /// Those that must be kernels.
    kernels: BTreeSet<String>,
    /// Those that macros put together, which must be kernels too.
    families: BTreeSet<String>,
    /// Those that files beside it hand over, to it or to another.
    lent: BTreeSet<String>,
}

/// Every file of `src/` that calls `Gpu::function`, with the names that files beside it hand over.
fn launchers() -> Vec<Launcher> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
    let sources: Vec<(String, String)> = files
        .iter()
        .map(|file| (file.file_name().unwrap().to_string_lossy().into_owned(), fs::read_to_string(file).unwrap()))
        .collect();
    let macros: Vec<_> = sources.iter().flat_map(|(_, source)| macros(source)).collect();
    let (launch, others): (Vec<_>, Vec<_>) = sources.iter().partition(|(_, source)| source.contains(".function("));
    let mut launchers: Vec<_> = launch.into_iter().map(|(file, source)| launcher(file, source, &macros)).collect();
    // A file that launches nothing itself may hand names to one that does.
    for (file, source) in others {
        let lent = launcher(file, source, &macros);
        for launcher in &mut launchers {
            if source.contains(&format!("    {}::", launcher.file.trim_end_matches(".rs"))) {
                launcher.lent.extend(lent.names.iter().cloned());
            }
        }
    }
    launchers
}

fn launcher(file: &str, source: &str, macros: &[(String, Vec<String>)]) -> Launcher {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    let names: BTreeSet<String> = strings(&code).filter(|text| is_name(text)).map(str::to_owned).collect();
    let mut kernels: BTreeSet<String> = names.iter().filter(|name| name.contains('_')).cloned().collect();
    let mut families = BTreeSet::new();
    for (name, endings) in macros {
        let call = format!("{name}!(");
        let calls = code.split(&call).skip(1);
        for family in calls.filter_map(|call| strings(&call[..closing(call)]).next()) {
            kernels.remove(family);
            families.extend(endings.iter().map(|ending| format!("{family}{ending}")));
        }
    }
    families.retain(|name| !name.starts_with(NEVER_ASKED));
    for call in code.split(".function(").skip(1) {
        let arguments = &call[..closing(call)];
        let behind_image = arguments.split_once(',').map_or("", |(_, rest)| rest);
        kernels.extend(strings(behind_image).map(str::to_owned));
    }
    Launcher { file: file.to_owned(), families, names, kernels, lent: BTreeSet::new() }
}

/// The macros of a file that put names together, each with the endings it gives.
fn macros(source: &str) -> Vec<(String, Vec<String>)> {
    let mut macros = Vec::new();
    for definition in source.split("macro_rules! ").skip(1) {
        let (name, behind) = definition.split_once(' ').unwrap_or((definition, ""));
        // A definition is closed by a brace at the start of a line.
        let body = behind.split("\n}").next().unwrap_or_default();
        let calls = body.split("concat!($").skip(1);
        let endings: Vec<_> =
            calls.filter_map(|call| strings(&call[..closing(call)]).next()).map(str::to_owned).collect();
        if !endings.is_empty() {
            macros.push((name.to_owned(), endings));
        }
    }
    macros
}

/// The strings of a piece of Rust that has no quotes in its strings.
fn strings(code: &str) -> impl Iterator<Item = &str> {
    code.split('"').skip(1).step_by(2)
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Where the parenthesis that was opened just before `code` is closed.
fn closing(code: &str) -> usize {
    let mut depth = 1;
    let end = code.find(|c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        depth == 0
    });
    end.unwrap_or(code.len())
}

/// What launchers ask for in vain, and what images hold in vain.
fn faults(images: &BTreeMap<String, Kernels>, launchers: &[Launcher]) -> Vec<String> {
    let mut faults = Vec::new();
    let mut asked: BTreeSet<(&str, &str)> = BTreeSet::new();
    for Launcher { file, names, kernels, families, lent } in launchers {
        let used: Vec<_> = images.iter().filter(|(image, _)| names.contains(*image)).collect();
        let everywhere = |name: &String| {
            used.iter().any(|(image, targets)| {
                targets.iter().filter(|(target, _)| is_for(image, target)).all(|(_, held)| held.contains(name))
            })
        };
        let somewhere = |name: &String| used.iter().any(|(_, image)| image.values().any(|held| held.contains(name)));
        // An image's name need not be a kernel's.
        let wanted = kernels.iter().filter(|name| !images.contains_key(*name) || somewhere(name)).chain(families);
        // What one target has of the strings is a kernel, whatever it looks like.
        let wanted = wanted.chain(names.iter().chain(lent).filter(|name| somewhere(name)));
        for name in wanted.filter(|name| !everywhere(name)) {
            faults.push(format!("{file} asks for `{name}`, which no image that it names holds for every target"));
        }
        let all = || names.iter().chain(families).chain(lent).map(String::as_str);
        asked.extend(used.iter().flat_map(|(image, _)| all().map(|name| (image.as_str(), name))));
    }
    for (image, kernels) in images {
        let held: BTreeSet<&String> = kernels.values().flatten().collect();
        for name in held.into_iter().filter(|name| !asked.contains(&(image.as_str(), name.as_str()))) {
            faults.push(format!("no launcher of the image `{image}` asks for its kernel `{name}`"));
        }
    }
    faults
}

#[test]
fn names_are_found_in_the_source_of_a_launcher() {
    let source = "// \"not_this\"\n\
        macro_rules! sized {\n    ($of:literal) => {\n        concat!($of, \"_4\"), concat!($of, \"_8\")\n    };\n}\n\
        fn add(gpu: &Gpu) -> Result<()> {\n    const NAME: &str = \"add rows\";\n    \
        let name = if wide { \"add_wide\" } else { sized!(\"add_rows\") };\n    \
        gpu.launch(&gpu.function(\"add\", if f(x) { \"add\" } else { name })?, launch)\n}\n\
        #[cfg(test)]\nmod tests { const A: &str = \"nor_this\"; }\n";
    let found = launcher("add.rs", source, &macros(source));
    assert_eq!(found.families.iter().collect::<Vec<_>>(), ["add_rows_4", "add_rows_8"]);
    let image = |names: &[&str]| {
        let names: BTreeSet<String> = names.iter().map(|&name| name.to_owned()).collect();
        let kernels = Kernels::from([("80".to_owned(), names.clone()), ("ptx".to_owned(), names)]);
        BTreeMap::from([("add".to_owned(), kernels)])
    };
    let faults = |names: &[&str]| faults(&image(names), std::slice::from_ref(&found)).len();
    assert_eq!(faults(&["add", "add_wide", "add_rows_4", "add_rows_8"]), 0);
    assert_eq!(faults(&["add", "add_wide", "add_rows_4"]), 1, "a kernel that is asked for is not there");
    assert_eq!(faults(&["add", "add_wide", "add_rows_4", "add_rows_8", "add_half"]), 1, "nobody asks for a kernel");
}
