//! Compiles every `cuda/*.cu` for every architecture into one fatbin each, which the crate embeds.
//!
//! `nvcc` is the one of `NVCC`, else `CUDA_HOME/bin`, else the search path, else `.cuda/` at the top of the workspace (which
//! `cargo xtask cuda-toolchain` fills). Without one the crate builds with an empty table, and opening a device says so.
//! `IRONLOOM_CUDA_ARCHS=90` (a list such as `80,90`) narrows the architectures while one works on a kernel.
//!
//! Each image is the machine code of sm_80, sm_86 and sm_90a and the assembly (PTX) of the newest, which later cards compile
//! at their first start and which has nothing of what is sm_90a's alone (`wgmma`). A file is compiled again when it, a header
//! or the compiler has changed. What was compiled also lies at the top of cargo's build folder, where the other profiles and
//! tools find it: clippy and every profile have output folders of their own, and all files take minutes.
//!
//! Lines of the source are not in the machine code (they were two thirds of it). A profiler shows them after a build with
//! `NVCC_APPEND_FLAGS=-lineinfo`, a variable that nvcc itself reads.

use std::{
    collections::{BTreeMap, hash_map::DefaultHasher},
    env, fs,
    hash::{Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    thread,
};

/// What is compiled where `IRONLOOM_CUDA_ARCHS` says nothing else.
const ARCHITECTURES: &str = "80,86,90";
/// Variables whose flags nvcc takes beside those of its command line.
const FLAGS: [&str; 2] = ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"];

fn main() {
    let folder = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("cuda");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo::rerun-if-changed={}", folder.display());
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", "IRONLOOM_CUDA_ARCHS"].into_iter().chain(FLAGS) {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    println!("cargo::rustc-check-cfg=cfg(kernels_built)");
    let Some(nvcc) = find_nvcc(&folder) else {
        println!("cargo::warning=no nvcc found: building without CUDA kernels (`cargo xtask cuda-toolchain` gets one)");
        write_table(&out, &[]);
        return;
    };
    let version = run(Command::new(&nvcc).arg("--version")).0;
    let architectures = env::var("IRONLOOM_CUDA_ARCHS").unwrap_or_else(|_| ARCHITECTURES.to_owned());
    let mut architectures: Vec<u32> = architectures
        .split(',')
        .map(|text| text.trim().parse().expect("IRONLOOM_CUDA_ARCHS is a list of numbers such as 80,86,90"))
        .collect();
    architectures.sort_unstable();
    architectures.dedup();
    let newest = *architectures.last().expect("IRONLOOM_CUDA_ARCHS names at least one architecture");
    let entries = fs::read_dir(&folder).expect("the kernels' folder can be listed").flatten().map(|entry| entry.path());
    let mut stems: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|name| name == "cu")).collect();
    stems.sort();

    let shared = shared_folder(&out);
    // One job for each file and target, the files that take longest first as the file size tells.
    let mut jobs: Vec<(PathBuf, Target)> = Vec::new();
    for stem in &stems {
        jobs.extend(architectures.iter().map(|&architecture| (stem.clone(), Target::Machine(architecture))));
        jobs.push((stem.clone(), Target::Assembly(newest)));
    }
    jobs.sort_by_key(|(file, _)| fs::metadata(file).map_or(0, |data| data.len()));
    let jobs = Mutex::new(jobs);
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let job = jobs.lock().expect("no compiler thread panicked").pop();
                    let Some((file, target)) = job else { break };
                    compile(&nvcc, &version, &file, target, &out, shared.as_deref());
                }
            });
        }
    });
    let mut images = Vec::new();
    for file in &stems {
        let name = stem_of(file);
        let mut link = Command::new(nvcc.with_file_name("fatbinary"));
        link.arg("-64").arg(format!("--create={}", out.join(format!("{name}.fatbin")).display()));
        let mut report = String::new();
        for &architecture in &architectures {
            let target = Target::Machine(architecture);
            let machine = machine_name(architecture);
            link.arg(format!("--image3=kind=elf,sm={machine},file={}", target.file(&out, &name).display()));
            report += &fs::read_to_string(target.report(&out, &name)).expect("nvcc wrote its messages");
        }
        let assembly = Target::Assembly(newest).file(&out, &name);
        link.arg(format!("--image3=kind=ptx,sm={newest},file={}", assembly.display()));
        run(&mut link);
        fs::write(out.join(format!("{name}.report.txt")), report).expect("the output folder can be written");
        let assembly = fs::read_to_string(&assembly).expect("nvcc wrote the assembly");
        images.push((name, kernels_of(&assembly)));
    }
    println!("cargo::rustc-cfg=kernels_built");
    write_table(&out, &images);
}

/// The names of an assembly's kernels.
fn kernels_of(assembly: &str) -> Vec<String> {
    let behind = assembly.split(".entry ").skip(1);
    behind.map(|text| text.split(['(', '\n']).next().unwrap_or_default().trim().to_owned()).collect()
}

/// What a file is compiled to.
#[derive(Clone, Copy)]
enum Target {
    /// Machine code of an architecture.
    Machine(u32),
    /// Assembly for cards from an architecture on.
    Assembly(u32),
}

impl Target {
    fn file(self, out: &Path, stem: &str) -> PathBuf {
        out.join(match self {
            Self::Machine(architecture) => format!("{stem}.sm_{architecture}.cubin"),
            Self::Assembly(_) => format!("{stem}.ptx"),
        })
    }

    fn report(self, out: &Path, stem: &str) -> PathBuf {
        self.file(out, stem).with_extension("messages.txt")
    }

    fn flags(self) -> [String; 2] {
        match self {
            Self::Machine(architecture) => ["-cubin".to_owned(), format!("-arch=sm_{}", machine_name(architecture))],
            Self::Assembly(architecture) => ["-ptx".to_owned(), format!("-arch=compute_{architecture}")],
        }
    }
}

/// An architecture with all of its instructions: those that no later one has (`wgmma`) need the name with an `a`. The other
/// kernels have the same machine code under both names.
fn machine_name(architecture: u32) -> String {
    format!("{architecture}{}", if architecture == 90 { "a" } else { "" })
}

/// Compiles a file for a target, unless `out` or the folder shared by all output folders has what the same sources, compiler
/// and flags gave before.
fn compile(nvcc: &Path, version: &str, file: &Path, target: Target, out: &Path, shared: Option<&Path>) {
    let stem = stem_of(file);
    let (output, report) = (target.file(out, &stem), target.report(out, &stem));
    let key_file = output.with_extension("key");
    let mut key = DefaultHasher::new();
    let mut sources = BTreeMap::new();
    read_with_headers(file, &mut sources);
    // Names instead of paths: another checkout with the same sources finds what this one compiled.
    let sources: Vec<_> = sources.iter().map(|(path, text)| (path.file_name(), text)).collect();
    (version, sources, target.flags(), FLAGS.map(env::var_os)).hash(&mut key);
    let key = format!("{:x}", key.finish());
    if output.exists() && report.exists() && fs::read_to_string(&key_file).is_ok_and(|old| old == key) {
        return;
    }
    // Until both files are there and new, no key says so.
    let _ = fs::remove_file(&key_file);
    let files = [&output, &report];
    if !shared.is_some_and(|shared| files.iter().all(|file| fs::copy(shared_file(shared, file, &key), file).is_ok())) {
        let mut command = Command::new(nvcc);
        command.args(target.flags()).args(["-std=c++17", "-O3", "-Xptxas", "-v", "-o"]).arg(&output).arg(file);
        let (_, messages) = run(&mut command);
        fs::write(&report, messages).expect("the output folder can be written");
        if let Some(shared) = shared {
            files.iter().for_each(|file| share(shared, file, &key));
        }
    }
    fs::write(&key_file, key).expect("the output folder can be written");
}

/// The folder `ironloom-kernels` at the top of cargo's build folder, which cargo marks with a file. None in a layout without.
fn shared_folder(out: &Path) -> Option<PathBuf> {
    let top = out.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file())?;
    let folder = top.join("ironloom-kernels");
    fs::create_dir_all(&folder).ok().map(|()| folder)
}

fn shared_file(shared: &Path, file: &Path, key: &str) -> PathBuf {
    shared.join(format!("{}.{key}", file.file_name().unwrap_or_default().to_string_lossy()))
}

/// Puts a file into the shared folder, whole or not at all, in the place of what other sources gave. Where that fails, nothing
/// is lost but time.
fn share(shared: &Path, file: &Path, key: &str) {
    let place = shared_file(shared, file, key);
    let part = shared_file(shared, file, &format!("{key}.{}", std::process::id()));
    if fs::copy(file, &part).and_then(|_| fs::rename(&part, &place)).is_err() {
        let _ = fs::remove_file(&part);
        return;
    }
    for old in fs::read_dir(shared).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if old != place && old.file_stem() == place.file_stem() {
            let _ = fs::remove_file(&old);
        }
    }
}

/// Runs a command to its end; standard output and standard error. Ends the build with both where it fails.
fn run(command: &mut Command) -> (String, String) {
    let output = command.output().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?} failed:\n{stdout}{stderr}");
    (stdout, stderr)
}

fn find_nvcc(folder: &Path) -> Option<PathBuf> {
    if let Some(path) = env::var_os("NVCC").filter(|path| !path.is_empty()) {
        return Some(path.into());
    }
    let homes =
        ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(|home| PathBuf::from(home).join("bin"));
    let search = env::var_os("PATH").unwrap_or_default();
    let workspace = folder.ancestors().nth(2).map(|top| top.join(".cuda/nvidia/cu13/bin"));
    homes
        .chain(env::split_paths(&search))
        .chain(workspace)
        .map(|folder| folder.join(format!("nvcc{}", env::consts::EXE_SUFFIX)))
        .find(|path| path.is_file())
}

/// The text of a source and of every header of ours that it includes.
fn read_with_headers(file: &Path, texts: &mut BTreeMap<PathBuf, String>) {
    if texts.contains_key(file) {
        return;
    }
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display()));
    let names = text.lines().filter_map(|line| line.trim().strip_prefix("#include \"")?.split('"').next());
    let folder = file.parent().expect("a file lies in a folder");
    let headers: Vec<PathBuf> = names.map(|name| folder.join(name)).collect();
    texts.insert(file.to_owned(), text);
    for header in headers {
        let header = header.canonicalize().unwrap_or(header);
        read_with_headers(&header, texts);
    }
}

fn stem_of(file: &Path) -> String {
    file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The Rust source of the table of images, each with the names of its assembly's kernels.
fn write_table(out: &Path, images: &[(String, Vec<String>)]) {
    let mut table = String::from("&[\n");
    for (name, kernels) in images {
        table += &format!(
            "Image {{ name: {name:?}, fatbin: include_bytes!({:?}), assembly: &{kernels:?} }},\n",
            out.join(format!("{name}.fatbin")),
        );
    }
    table += "]\n";
    fs::write(out.join("images.rs"), table).expect("the output folder can be written");
}
