//! The date and time in UTC, written as Python's `strftime` does, for templates that tell the model today's date.
//!
//! Days to civil dates: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms".

use std::time::{SystemTime, UNIX_EPOCH};

/// A moment of the proleptic Gregorian calendar, UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DateTime {
    /// Days since 1 January 1970.
    days: u64,
    /// Seconds of the day.
    seconds: u64,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl DateTime {
    /// The moment so many seconds after the start of 1970.
    pub(super) fn at(seconds: u64) -> Self {
        Self { days: seconds / 86_400, seconds: seconds % 86_400 }
    }

    /// The system's clock; 1970 where it is set before that.
    pub(super) fn now() -> Self {
        Self::at(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs()))
    }

    /// Year, month from 1, day from 1.
    fn date(self) -> (u64, u64, u64) {
        let days = self.days + 719_468;
        let (era, day_of_era) = (days / 146_097, days % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted + 2) / 5 + 1;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        (era * 400 + year_of_era + u64::from(month <= 2), month, day)
    }

    /// `strftime` in English; the conversion that isn't known is the error.
    pub(super) fn format(self, format: &str) -> Result<String, String> {
        let (year, month, day) = self.date();
        let (hour, minute, second) = (self.seconds / 3600, self.seconds / 60 % 60, self.seconds % 60);
        let month_name = MONTHS[(month - 1) as usize];
        let weekday = WEEKDAYS[((self.days + 4) % 7) as usize];
        let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
        let mut result = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                result.push(character);
                continue;
            }
            let conversion = characters.next();
            let text = match conversion {
                Some('Y') => year.to_string(),
                Some('y') => format!("{:02}", year % 100),
                Some('m') => format!("{month:02}"),
                Some('B') => month_name.to_owned(),
                Some('b' | 'h') => month_name[..3].to_owned(),
                Some('d') => format!("{day:02}"),
                Some('e') => format!("{day:2}"),
                Some('A') => weekday.to_owned(),
                Some('a') => weekday[..3].to_owned(),
                Some('H') => format!("{hour:02}"),
                Some('I') => format!("{hour12:02}"),
                Some('M') => format!("{minute:02}"),
                Some('S') => format!("{second:02}"),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                Some('F') => format!("{year}-{month:02}-{day:02}"),
                Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
                Some('Z') => "UTC".to_owned(),
                Some('%') => "%".to_owned(),
                other => return Err(other.map(String::from).unwrap_or_default()),
            };
            result.push_str(&text);
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, wanted) in [
            (0, "1970-01-01 00:00:00 Thu"),
            (951_782_400, "2000-02-29 00:00:00 Tue"),
            (1_721_999_999, "2024-07-26 13:19:59 Fri"),
            (4_107_542_399, "2100-02-28 23:59:59 Sun"),
            (4_107_542_400, "2100-03-01 00:00:00 Mon"),
        ] {
            assert_eq!(DateTime::at(seconds).format("%F %T %a").unwrap(), wanted);
        }
        assert_eq!(
            DateTime::at(1_721_999_999).format("%A %d %B %Y, %e %b %y %I %p %%").unwrap(),
            "Friday 26 July 2024, 26 Jul 24 01 PM %"
        );
        assert_eq!(DateTime::at(0).format("%"), Err(String::new()));
    }
}
