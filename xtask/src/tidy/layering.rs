//! Who may use whom: a crate uses only crates above it in the table of rooms.

use super::Finding;
use crate::workspace::{self, Package};

/// The rooms, bottom first. A crate may depend on those before it, in tests too.
const ROOMS: [&str; 15] = [
    "ironloom-core",
    "ironloom-weights",
    "ironloom-quant",
    "ironloom-kernels",
    "ironloom-tensor",
    "ironloom-nn",
    "ironloom-lm",
    "ironloom-decode",
    "ironloom-train",
    "ironloom-image",
    "ironloom-serve",
    "ironloom",
    "ironloom-test-driver",
    "ironloom-benches",
    "xtask",
];

/// Every dependency inside the workspace that goes the wrong way, and every crate without a place.
pub(super) fn check(packages: &[Package]) -> Vec<Finding> {
    let place = |name: &str| ROOMS.iter().position(|&room| room == name);
    let mut findings = Vec::new();
    for package in packages {
        let manifest = package.folder().join("Cargo.toml");
        let Some(own) = place(&package.name) else {
            findings.push(Finding::error(
                "layering",
                &manifest,
                format!("`{}` has no place in the table of rooms", package.name),
            ));
            continue;
        };
        let inside = package
            .dependencies
            .iter()
            .filter(|dependency| dependency.path.as_ref().is_some_and(|path| path.starts_with(workspace::root())));
        for dependency in inside {
            if place(&dependency.name).is_none_or(|theirs| theirs >= own) {
                let message =
                    format!("`{}` may not use `{}`: only rooms before it in the table", package.name, dependency.name);
                findings.push(Finding::error("layering", &manifest, message));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Dependency;

    fn package(name: &str, uses: &[&str]) -> Package {
        let folder = workspace::root().join("crates").join(name);
        let dependency = |&name: &&str| {
            let inside = name.starts_with("ironloom");
            Dependency { name: name.to_owned(), path: inside.then(|| workspace::root().join("crates").join(name)) }
        };
        Package {
            name: name.to_owned(),
            manifest_path: folder.join("Cargo.toml"),
            dependencies: uses.iter().map(dependency).collect(),
            targets: Vec::new(),
            publish: None,
        }
    }

    #[test]
    fn only_rooms_below_may_be_used() {
        assert!(check(&[package("ironloom-nn", &["ironloom-tensor", "serde"])]).is_empty());
        assert_eq!(check(&[package("ironloom-tensor", &["ironloom-nn"])]).len(), 1);
        assert_eq!(check(&[package("ironloom-tensor", &["ironloom-tensor"])]).len(), 1);
        assert_eq!(check(&[package("ironloom-tensor", &["ironloom-unheard-of"])]).len(), 1);
        assert_eq!(check(&[package("ironloom-unheard-of", &[])]).len(), 1);
    }

    #[test]
    fn this_workspace_is_in_order() {
        assert_eq!(check(&workspace::packages().unwrap()), []);
    }
}
