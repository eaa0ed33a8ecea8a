//! What machine and what graphics card this is, how busy it is, and where its records are kept.

use std::{
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use ironloom_tensor::Device;
use serde::Serialize;

use crate::workspace;

/// As many threads as this process may run at once.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The processor and the threads used of it, such as `AMD EPYC 7763 64-Core Processor, 2 threads`.
pub(crate) fn device_name() -> String {
    format!("{}, {} threads", Processor::read().model, threads())
}

/// The folder that holds this device's records.
pub(crate) fn records_folder() -> PathBuf {
    workspace::root().join("benches").join("records").join(Processor::read().slug(threads()))
}

/// The name of `device` in records: the graphics card's, or the processor's with its threads.
pub(crate) fn name_of(device: &Device) -> String {
    match device {
        Device::Cuda(card) => card.gpu().properties().name.clone(),
        _ => device_name(),
    }
}

/// The folder that holds the records of `device`.
pub(crate) fn records_of(device: &Device) -> PathBuf {
    match device {
        Device::Cuda(card) => {
            workspace::root().join("benches").join("records").join(card_slug(&card.gpu().properties().name))
        }
        _ => records_folder(),
    }
}

/// A graphics card's name for a folder, such as `nvidia-h200`.
pub(crate) fn card_slug(name: &str) -> String {
    let name = name.to_lowercase();
    name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
}

/// Writes a record as JSON that reads well in a diff.
pub(crate) fn write_record(path: &Path, record: &impl Serialize) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let text = serde_json::to_string_pretty(record)? + "\n";
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The load average of the last minute; 0 where the system does not say.
pub(crate) fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// The most memory this process has held, in MiB; 0 where the system does not say.
pub(crate) fn peak_mib() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}

/// How long the processor and this process have worked, in the system's ticks; to see what others took meanwhile.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProcessorTime {
    all: u64,
    idle: u64,
    own: u64,
}

impl ProcessorTime {
    /// The ticks until now; all 0 where the system does not say.
    pub(crate) fn now() -> Self {
        let system = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let process = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        Self::parse(&system, &process).unwrap_or_default()
    }

    /// The share of the processor that other processes (or other machines on the same host) took since then.
    pub(crate) fn share_of_others(self) -> f64 {
        let now = Self::now();
        let [all, idle, own] = [now.all - self.all, now.idle - self.idle, now.own - self.own];
        if all == 0 { 0.0 } else { all.saturating_sub(idle + own) as f64 / all as f64 }
    }

    /// From `/proc/stat` (user, nice, system, idle, iowait, irq, softirq, steal) and `/proc/self/stat` (whose 14th and 15th
    /// fields are this process's user and system time; the second may contain spaces but ends with `)`).
    fn parse(system: &str, process: &str) -> Option<Self> {
        let numbers = |text: &str| text.split_whitespace().map(|word| word.parse().unwrap_or(0)).collect::<Vec<u64>>();
        let all = numbers(system.lines().next()?.strip_prefix("cpu ")?);
        let own = numbers(process.rsplit_once(") ")?.1);
        let idle = all.get(3)? + all.get(4)?;
        Some(Self { all: all.iter().take(8).sum(), idle, own: own.get(11)? + own.get(12)? })
    }
}

/// Today, as `2026-12-01`, in universal time.
pub(crate) fn date() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (year, month, day) = civil_date(seconds / 86_400);
    format!("{year:04}-{month:02}-{day:02}")
}

/// Year, month and day of a number of days since 1970-01-01, in the Gregorian calendar.
fn civil_date(mut days: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

/// The processor, as the system names it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Processor {
    model: String,
    /// Family and model number, for names that say little (a virtual machine's often do).
    numbers: String,
}

impl Processor {
    fn read() -> Self {
        let described = Self::parse(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
        described.unwrap_or_else(|| Self { model: std::env::consts::ARCH.to_owned(), numbers: String::new() })
    }

    /// From the text of `/proc/cpuinfo`.
    fn parse(text: &str) -> Option<Self> {
        let value = |key: &str| {
            text.lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(name, _)| name.trim() == key)
                .map(|(_, value)| value.trim())
        };
        let numbers = [value("cpu family"), value("model")].into_iter().flatten().collect::<Vec<_>>().join("-");
        Some(Self { model: value("model name")?.to_owned(), numbers })
    }

    /// Its name for a folder, such as `cpu-amd-epyc-7763-2t`.
    fn slug(&self, threads: usize) -> String {
        let name = self.model.to_lowercase().replace("(r)", " ").replace("(tm)", " ");
        let name = name.split('@').next().unwrap_or_default();
        let words = name.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').filter(|word| {
            !word.is_empty() && !["cpu", "processor", "with"].contains(word) && !word.ends_with("-core")
        });
        let mut words: Vec<&str> = words.collect();
        if !words.iter().any(|word| word.chars().any(|c| c.is_ascii_digit())) && !self.numbers.is_empty() {
            words.push(&self.numbers);
        }
        format!("cpu-{}-{threads}t", words.join("-"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slugs_name_the_processor() {
        let slug = |model: &str| Processor { model: model.to_owned(), numbers: "6-207".to_owned() }.slug(2);
        assert_eq!(slug("AMD EPYC 7763 64-Core Processor"), "cpu-amd-epyc-7763-2t");
        assert_eq!(slug("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz"), "cpu-intel-xeon-platinum-8480c-2t");
        assert_eq!(slug("Intel(R) Xeon(R) Processor"), "cpu-intel-xeon-6-207-2t");
    }

    #[test]
    fn slugs_name_the_card() {
        assert_eq!(card_slug("NVIDIA H200"), "nvidia-h200");
        assert_eq!(card_slug("NVIDIA A100-SXM4-80GB"), "nvidia-a100-sxm4-80gb");
    }

    #[test]
    fn the_processor_is_read_from_the_system_s_text() {
        let text = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: A B\n";
        assert_eq!(Processor::parse(text), Some(Processor { model: "A B".to_owned(), numbers: "6-207".to_owned() }));
        assert_eq!(Processor::parse(""), None);
    }

    #[test]
    fn ticks_are_read() {
        let system = "cpu  10 1 5 100 4 0 2 3 0 0\ncpu0 1 1 1 1\n";
        let process = "7 (a b) S 1 2 3 4 5 6 7 8 9 10 20 5 0 0";
        let time = ProcessorTime::parse(system, process).unwrap();
        assert_eq!((time.all, time.idle, time.own), (125, 104, 25));
        assert!(ProcessorTime::parse("", "").is_none());
    }

    #[test]
    fn dates_over_leap_years() {
        assert_eq!(civil_date(0), (1970, 1, 1));
        assert_eq!(civil_date(11_016), (2000, 2, 29));
        assert_eq!(civil_date(20_786), (2026, 11, 29));
        assert_eq!(civil_date(20_818), (2026, 12, 31));
    }
}
