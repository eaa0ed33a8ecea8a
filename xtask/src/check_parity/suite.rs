//! Running the cases and saying how they went.

use anyhow::{Result, bail, ensure};
use ironloom_tensor::Device;

use super::{
    Arguments,
    case::{Case, Kernel, Outcome},
    exact, greedy, models, operations,
    place::is_cpu,
    record,
};
use crate::table::Table;

/// Runs the cases, prints a table, and fails when one does not hold.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = match arguments.device {
        super::Device::Cpu => Device::cpu(0),
        super::Device::Cuda => Device::cuda(0, 0)?,
    };
    if let Some(name) = &arguments.logits_of {
        return exact::write_logits(&device, name);
    }
    let kernel = if arguments.mutate { Kernel::OneInFourDropped } else { Kernel::Ours };
    let named = |case: &Case| arguments.names.iter().any(|name| case.operation.starts_with(name.as_str()));
    let cases: Vec<Case> =
        all_cases(&device)?.into_iter().filter(|case| arguments.names.is_empty() || named(case)).collect();
    ensure!(!cases.is_empty(), "no case is called {}", arguments.names.join(" or "));

    let outcomes: Vec<(Case, Outcome)> = cases
        .into_iter()
        .map(|case| {
            let outcome = case.run(kernel);
            (case, outcome)
        })
        .collect();
    print!("{}", if arguments.verbose { table_of_cases(&outcomes) } else { table_of_operations(&outcomes) });
    for (case, outcome) in &outcomes {
        if !outcome.passes() && !arguments.mutate {
            println!("failed: {} {}: {outcome}", case.operation, case.shape);
        }
    }
    let failed = outcomes.iter().filter(|(_, outcome)| !outcome.passes()).count();
    if arguments.mutate {
        let blind: Vec<String> = outcomes
            .iter()
            .filter(|(_, outcome)| outcome.passes())
            .map(|(case, _)| format!("{} {}", case.operation, case.shape))
            .collect();
        if !blind.is_empty() {
            bail!(
                "{} of {} cases do not see that one input in four is dropped: {}",
                blind.len(),
                outcomes.len(),
                blind.join("; ")
            );
        }
        println!("all {} cases see a kernel that drops one input in four", outcomes.len());
        return Ok(());
    }
    if arguments.record {
        println!("recorded {}", record::write(&device, &outcomes)?.display());
    }
    if failed > 0 {
        bail!("{failed} of {} parity cases failed", outcomes.len());
    }
    println!("all {} parity cases hold", outcomes.len());
    Ok(())
}

fn all_cases(device: &Device) -> Result<Vec<Case>> {
    let mut cases = operations::cases(device);
    cases.extend(models::cases(device)?);
    if !is_cpu(device) {
        // The processor's are tests of the language models.
        cases.extend(exact::cases(device));
        cases.extend(greedy::cases(device)?);
    }
    Ok(cases)
}

fn table_of_cases(outcomes: &[(Case, Outcome)]) -> Table {
    let mut table = Table::new(&["operation", "shape", "error", "bound", "of bound", ""]);
    for (case, outcome) in outcomes {
        table.row([
            case.operation.clone(),
            case.shape.clone(),
            format!("{:.1e}", outcome.error),
            format!("{:.1e}", outcome.bound),
            format!("{:.2}", outcome.of_bound()),
            outcome.verdict().to_owned(),
        ]);
    }
    table
}

/// One line for each operation, with its worst case.
fn table_of_operations(outcomes: &[(Case, Outcome)]) -> Table {
    let mut table = Table::new(&["operation", "cases", "failed", "worst shape", "error", "bound", "of bound"]);
    let mut operations: Vec<&str> = Vec::new();
    for (case, _) in outcomes {
        if !operations.contains(&case.operation.as_str()) {
            operations.push(&case.operation);
        }
    }
    for operation in operations {
        let of_it: Vec<_> = outcomes.iter().filter(|(case, _)| case.operation == operation).collect();
        let failed = of_it.iter().filter(|(_, outcome)| !outcome.passes()).count();
        let Some((case, worst)) = of_it.iter().copied().max_by(|a, b| a.1.of_bound().total_cmp(&b.1.of_bound())) else {
            continue;
        };
        table.row([
            operation.to_owned(),
            of_it.len().to_string(),
            failed.to_string(),
            case.shape.clone(),
            format!("{:.1e}", worst.error),
            format!("{:.1e}", worst.bound),
            format!("{:.2}", worst.of_bound()),
        ]);
    }
    table
}
