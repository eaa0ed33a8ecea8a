//! A picture of a run's losses: an SVG that any browser shows, written anew as the run goes on.
//!
//! In: the losses of a [log](crate::log), `loss` each step and `held_out_loss` now and then. Out: the training loss as a thin
//! line and, smoothed, as a thick one, and the held-out loss as points joined by a line. The smoothed line is the mean of the steps around
//! each, at the start none more to one side than to the other, so that it does not lag behind where the loss falls fast. The loss axis is
//! logarithmic where the losses span a factor of 3, so that the late part of a run can be seen.

use std::{fmt::Write, path::Path};

use ironloom_core::{grouped, replace_file};

use crate::{Error, Result, log::entries};

/// What a loss plot shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossPlot {
    /// Stands above it.
    pub title: String,
    /// Steps and their losses, in order.
    pub training: Vec<(u64, f64)>,
    /// Steps and their losses on held-out data, in order.
    pub held_out: Vec<(u64, f64)>,
}

impl LossPlot {
    /// The losses of a log.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn from_log(log: impl AsRef<Path>, title: impl Into<String>) -> Result<Self> {
        let mut plot = Self { title: title.into(), ..Self::default() };
        for (step, entry) in entries(log)? {
            let finite = |field: &str| entry.get(field)?.as_f64().filter(|loss| loss.is_finite());
            plot.training.extend(finite("loss").map(|loss| (step, loss)));
            plot.held_out.extend(finite("held_out_loss").map(|loss| (step, loss)));
        }
        Ok(plot)
    }

    /// Writes the picture, replacing the one that was there at once.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        replace_file(path, self.svg().as_bytes()).map_err(|source| Error::Write { path: path.to_owned(), source })
    }

    /// The picture.
    pub fn svg(&self) -> String {
        let ceiling = ceiling(&self.training);
        let smoothed = smooth(&self.training, ceiling);
        let axes = Axes::new(&self.training, &smoothed, &self.held_out, ceiling);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
             height=\"{HEIGHT}\" font-family=\"system-ui, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', sans-serif\" \
             font-size=\"14\" fill=\"{INK}\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
             <clipPath id=\"area\"><rect x=\"{LEFT}\" y=\"{TOP}\" width=\"{}\" height=\"{}\"/></clipPath>\n",
            RIGHT - LEFT,
            BOTTOM - TOP,
        );
        text(&mut svg, (LEFT, 36.0), "start", "font-size=\"19\" font-weight=\"600\"", &self.title);
        axes.draw(&mut svg);
        let raw = thin_out(&self.training, &axes);
        line(&mut svg, &axes, &raw, &format!("stroke=\"{TRAINING}\" stroke-width=\"1\" stroke-opacity=\"0.3\""));
        let smoothed = thin_out(&smoothed, &axes);
        line(&mut svg, &axes, &smoothed, &format!("stroke=\"{TRAINING}\" stroke-width=\"2.4\""));
        line(&mut svg, &axes, &self.held_out, &format!("stroke=\"{HELD_OUT}\" stroke-width=\"1.8\""));
        const MOST_DOTS: usize = 60;
        if self.held_out.len() <= MOST_DOTS {
            for &(step, loss) in &self.held_out {
                let (x, y) = axes.place(step, loss);
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.6\" fill=\"{HELD_OUT}\" stroke=\"#ffffff\" stroke-width=\"1.2\"/>"
                );
            }
        }
        let last = |losses: &[(u64, f64)]| losses.last().map(|last| last.1);
        self.draw_legend(&mut svg, last(&smoothed), last(&self.held_out));
        svg.push_str("</svg>\n");
        svg
    }

    fn draw_legend(&self, svg: &mut String, training: Option<f64>, held_out: Option<f64>) {
        let mut x = RIGHT;
        for (name, color, loss) in [("held out", HELD_OUT, held_out), ("training", TRAINING, training)] {
            let Some(loss) = loss else { continue };
            let label = format!("{name} {loss:.3}");
            text(svg, (x, 36.0), "end", "", &label);
            // Letters of this size take about 7.4 units.
            x -= label.len() as f64 * 7.4 + 8.0;
            let _ = writeln!(
                svg,
                "<line x1=\"{:.1}\" x2=\"{x:.1}\" y1=\"31\" y2=\"31\" stroke=\"{color}\" stroke-width=\"3\" \
                 stroke-linecap=\"round\"/>",
                x - 20.0
            );
            x -= 44.0;
        }
    }
}

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 540.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 930.0;
const TOP: f64 = 58.0;
const BOTTOM: f64 = 476.0;
const INK: &str = "#24292f";
const FAINT: &str = "#57606a";
const GRID: &str = "#e6e8eb";
const TRAINING: &str = "#1f6feb";
const HELD_OUT: &str = "#d9480f";

/// Steps and losses to places in the picture.
struct Axes {
    steps: (f64, f64),
    losses: (f64, f64),
    logarithmic: bool,
}

impl Axes {
    fn new(training: &[(u64, f64)], smoothed: &[(u64, f64)], held_out: &[(u64, f64)], ceiling: f64) -> Self {
        let steps = training.iter().chain(held_out).map(|&(step, _)| step as f64);
        let first = steps.clone().fold(f64::INFINITY, f64::min);
        let last = steps.fold(f64::NEG_INFINITY, f64::max);
        // A run from its beginning is drawn from 0.
        let from = if first < last && first > 0.05 * last { first } else { 0.0 };
        let steps = (from, last.max(from + 1.0));
        // The thin line may leave the picture where single steps stand out: one in a hundred to either side.
        let raw = sorted(training);
        let cut = raw.len() / 100;
        let inner = &raw[cut..raw.len() - cut];
        let held_out = held_out.iter().map(|&(_, loss)| loss.min(ceiling));
        let shown = smoothed.iter().map(|&(_, loss)| loss).chain(held_out).chain(inner.iter().copied());
        let low = shown.clone().fold(f64::INFINITY, f64::min);
        let high = shown.fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        let logarithmic = low > 0.0 && high / low > 3.0;
        let losses = if logarithmic {
            let room = libm::pow(high / low, 0.05);
            (low / room, high * room)
        } else {
            let room = if high > low { (high - low) * 0.06 } else { high.abs().max(1.0) * 0.05 };
            (low - room, high + room)
        };
        Self { steps, losses, logarithmic }
    }

    fn place(&self, step: u64, loss: f64) -> (f64, f64) {
        let across = (step as f64 - self.steps.0) / (self.steps.1 - self.steps.0);
        (LEFT + across * (RIGHT - LEFT), self.height(loss))
    }

    fn height(&self, loss: f64) -> f64 {
        let scale = |loss: f64| if self.logarithmic { libm::log(loss.max(f64::MIN_POSITIVE)) } else { loss };
        let up = (scale(loss) - scale(self.losses.0)) / (scale(self.losses.1) - scale(self.losses.0));
        // A loss far outside is clipped, and must not become a number that viewers can't read.
        (BOTTOM - up * (BOTTOM - TOP)).clamp(-10.0 * HEIGHT, 10.0 * HEIGHT)
    }

    fn draw(&self, svg: &mut String) {
        let losses = if self.logarithmic { logarithmic_ticks(self.losses) } else { even_ticks(self.losses, 6) };
        let most_decimals = losses.iter().map(|&tick| decimals(tick)).max().unwrap_or_default();
        for tick in losses {
            let decimals = if self.logarithmic { decimals(tick) } else { most_decimals };
            let y = self.height(tick);
            let _ = writeln!(svg, "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"{GRID}\"/>");
            let label = format!("{tick:.decimals$}");
            text(svg, (LEFT - 10.0, y + 5.0), "end", &format!("fill=\"{FAINT}\""), &label);
        }
        for tick in even_ticks(self.steps, 8).into_iter().filter(|tick| tick.fract() == 0.0 && *tick >= 0.0) {
            let (x, _) = self.place(tick as u64, self.losses.0);
            let _ = writeln!(svg, "<path d=\"M{x:.1} {TOP}V{BOTTOM}\" stroke=\"{GRID}\"/>");
            text(svg, (x, BOTTOM + 22.0), "middle", &format!("fill=\"{FAINT}\""), &grouped(tick as u64));
        }
        let _ = writeln!(svg, "<path d=\"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}\" fill=\"none\" stroke=\"{FAINT}\"/>");
        text(svg, ((LEFT + RIGHT) / 2.0, HEIGHT - 18.0), "middle", "", "step");
        let middle = (TOP + BOTTOM) / 2.0;
        let turned = format!("transform=\"rotate(-90 22 {middle})\"");
        let label = if self.logarithmic { "loss (nats a token, log scale)" } else { "loss (nats a token)" };
        text(svg, (22.0, middle), "middle", &turned, label);
    }
}

fn sorted(losses: &[(u64, f64)]) -> Vec<f64> {
    let mut sorted: Vec<f64> = losses.iter().map(|&(_, loss)| loss).collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// What no loss of a sound step exceeds: a run that blew up for a few steps is still to be seen.
fn ceiling(training: &[(u64, f64)]) -> f64 {
    let sorted = sorted(training);
    match (sorted.get(sorted.len() * 99 / 100), training.first()) {
        (Some(&high), Some(&(_, first))) if high > 0.0 => (1.25 * high).max(1.05 * first),
        _ => f64::INFINITY,
    }
}

/// The mean of the steps around each: a sixtieth of all to either side; near the start as few as come before, at the end those before it.
fn smooth(losses: &[(u64, f64)], ceiling: f64) -> Vec<(u64, f64)> {
    let mut sums = Vec::with_capacity(losses.len() + 1);
    let mut sum = 0.0;
    sums.push(sum);
    for &(_, loss) in losses {
        sum += loss.min(ceiling);
        sums.push(sum);
    }
    let mean = |(i, &(step, _)): (usize, &(u64, f64))| {
        let before = (losses.len() / 60).min(i);
        let after = before.min(losses.len() - 1 - i);
        (step, (sums[i + after + 1] - sums[i - before]) / (before + 1 + after) as f64)
    };
    losses.iter().enumerate().map(mean).collect()
}

/// Of the losses in each half unit of width, the lowest and the highest: nothing more could be seen.
fn thin_out(losses: &[(u64, f64)], axes: &Axes) -> Vec<(u64, f64)> {
    let column = |&(step, _): &(u64, f64)| (axes.place(step, 1.0).0 * 2.0) as i64;
    let mut kept = Vec::new();
    for same in losses.chunk_by(|a, b| column(a) == column(b)) {
        let low = same.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        let high = same.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let (Some(&low), Some(&high)) = (low, high) else { continue };
        kept.push(if low.0 <= high.0 { low } else { high });
        if same.len() > 1 {
            kept.push(if low.0 <= high.0 { high } else { low });
        }
    }
    // The line ends with the last loss, which the legend tells.
    if let (Some(&last), Some(kept_last)) = (losses.last(), kept.last_mut())
        && kept_last.0 != last.0
    {
        *kept_last = last;
    }
    kept
}

fn line(svg: &mut String, axes: &Axes, losses: &[(u64, f64)], style: &str) {
    if losses.len() < 2 {
        return;
    }
    svg.push_str("<polyline clip-path=\"url(#area)\" fill=\"none\" stroke-linejoin=\"round\" ");
    svg.push_str(style);
    svg.push_str(" points=\"");
    for (i, &(step, loss)) in losses.iter().enumerate() {
        let (x, y) = axes.place(step, loss);
        let _ = write!(svg, "{}{x:.1},{y:.1}", if i == 0 { "" } else { " " });
    }
    svg.push_str("\"/>\n");
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, attributes: &str, text: &str) {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    // Control characters are not allowed in XML.
    let escaped = escaped.replace(|c: char| c.is_control(), " ");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {attributes}>{escaped}</text>");
}

/// At most about `count` numbers at even distances of 1, 2 or 5 times a power of ten.
fn even_ticks((low, high): (f64, f64), count: usize) -> Vec<f64> {
    let rough = (high - low) / count as f64;
    if !(rough.is_finite() && rough > 0.0) {
        return vec![low];
    }
    let power = libm::pow(10.0, libm::floor(libm::log10(rough)));
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|&step| step >= rough);
    let step = step.unwrap_or(10.0 * power);
    let (first, last) = (libm::ceil(low / step) as i64, libm::floor(high / step) as i64);
    (first..=last).map(|number| rounded(number as f64 * step)).collect()
}

/// Numbers that people read easily on a logarithmic axis, more where it is short.
fn logarithmic_ticks((low, high): (f64, f64)) -> Vec<f64> {
    const FINE: &[f64] = &[1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0];
    const MEDIUM: &[f64] = &[1.0, 1.5, 2.0, 3.0, 5.0, 7.0];
    const COARSE: &[f64] = &[1.0, 2.0, 5.0];
    let decades = libm::log10(high / low);
    let factors = if decades < 0.8 {
        FINE
    } else if decades < 1.3 {
        MEDIUM
    } else if decades < 3.0 {
        COARSE
    } else {
        &[1.0]
    };
    let (first, last) = (libm::floor(libm::log10(low)) as i32, libm::ceil(libm::log10(high)) as i32);
    let all = (first..=last).flat_map(|power| factors.iter().map(move |factor| (factor, power)));
    let ticks = all.map(|(factor, power)| rounded(factor * libm::pow(10.0, f64::from(power))));
    ticks.filter(|tick| (low..=high).contains(tick)).collect()
}

/// Without the last digits, which multiplying left.
fn rounded(tick: f64) -> f64 {
    format!("{tick:.9e}").parse().unwrap_or(tick)
}

fn decimals(tick: f64) -> usize {
    (0..6).find(|&decimals| format!("{tick:.decimals$}").parse() == Ok(tick)).unwrap_or(6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_inside() {
        assert_eq!(even_ticks((0.0, 499.0), 8), [0.0, 100.0, 200.0, 300.0, 400.0]);
        assert_eq!(even_ticks((2.93, 3.31), 6), [3.0, 3.1, 3.2, 3.3]);
        assert_eq!(even_ticks((5.0, 5.0), 6), [5.0]);
        assert_eq!(logarithmic_ticks((2.9, 8.6)), [3.0, 4.0, 5.0, 6.0, 8.0]);
        assert_eq!(logarithmic_ticks((0.09, 8.6)), [0.1, 0.2, 0.5, 1.0, 2.0, 5.0]);
        assert_eq!((decimals(3.0), decimals(2.5), decimals(0.05)), (0, 1, 2));
    }

    #[test]
    fn smoothing_keeps_the_start_and_straight_lines() {
        let straight: Vec<(u64, f64)> = (0..600).map(|i| (i, 10.0 - i as f64 / 100.0)).collect();
        for (found, wanted) in smooth(&straight, 20.0).iter().zip(&straight) {
            let allowed = if wanted.0 < 590 { 1e-9 } else { 0.06 };
            assert!((found.1 - wanted.1).abs() < allowed, "{found:?} for {wanted:?}");
        }
        let noisy: Vec<(u64, f64)> = (0..600).map(|i| (i, if i % 2 == 0 { 1.0 } else { 3.0 })).collect();
        assert!([300, 599].into_iter().all(|step| (smooth(&noisy, 20.0)[step].1 - 2.0).abs() < 0.1));
        assert_eq!(smooth(&[], 20.0), []);
    }

    #[test]
    fn a_long_run_stays_a_small_file_and_ends_with_its_last_loss() {
        let training: Vec<(u64, f64)> = (0..100_000).map(|i| (i, 2.0 + 6.0 / (1.0 + i as f64 / 500.0))).collect();
        let plot = LossPlot { title: "a <b> & c\u{1}".into(), training, held_out: vec![(0, 8.1), (50_000, 2.2)] };
        let svg = plot.svg();
        assert!(svg.len() < 100_000, "{} bytes", svg.len());
        assert!(svg.contains("a &lt;b&gt; &amp; c <"), "the title is escaped");
        assert_eq!(svg.matches("<circle").count(), 2);
        let axes = Axes::new(&plot.training, &plot.training, &[], 10.0);
        assert_eq!(thin_out(&plot.training, &axes).last(), plot.training.last());
    }

    #[test]
    fn nothing_one_step_and_losses_that_are_no_numbers_make_a_picture() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log.jsonl");
        std::fs::write(&log, "{\"step\":1,\"loss\":null}\n{\"step\":2,\"loss\":3.5,\"held_out_loss\":3.75}\nhalf")
            .unwrap();
        let plot = LossPlot::from_log(&log, "run").unwrap();
        assert_eq!(
            (plot.training.as_slice(), plot.held_out.as_slice()),
            ([(2, 3.5)].as_slice(), [(2, 3.75)].as_slice())
        );
        for plot in [plot, LossPlot::default()] {
            let svg = plot.svg();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            plot.write(folder.path().join("loss.svg")).unwrap();
        }
        // One step that blew up does not make all others flat.
        let loss = |step: u64| if step == 50 { 1e30 } else { 3.0 + (step % 7) as f64 / 10.0 };
        let spike = LossPlot { training: (0..300).map(|step| (step, loss(step))).collect(), ..LossPlot::default() };
        let ceiling = ceiling(&spike.training);
        let axes = Axes::new(&spike.training, &smooth(&spike.training, ceiling), &[], ceiling);
        assert!(axes.losses.0 > 2.5 && axes.losses.1 < 4.5, "{:?}", axes.losses);
        assert!(spike.svg().contains("training 3."));
    }
}
