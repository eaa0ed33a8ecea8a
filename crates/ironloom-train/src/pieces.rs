//! Work on pieces of one parameter, by any number of threads.
//!
//! A piece is a fixed number of elements, whatever the number of threads, and each piece owns what it writes. So which
//! thread takes it changes nothing.

use std::sync::{Mutex, PoisonError};

use ironloom_core::Threads;

/// Elements of a piece: a multiple of every block size, and small enough that a large parameter is many of them.
pub(crate) const PIECE: usize = 1 << 16;

/// Runs `work` on each piece once, in any order, with the piece's number.
pub(crate) fn for_each<T: Send>(threads: &Threads, pieces: impl Iterator<Item = T>, work: impl Fn(usize, T) + Sync) {
    if threads.count() == 1 {
        return pieces.enumerate().for_each(|(number, piece)| work(number, piece));
    }
    let pieces: Vec<Mutex<Option<T>>> = pieces.map(|piece| Mutex::new(Some(piece))).collect();
    threads.run(pieces.len(), |number| {
        // The lock is this task's alone: it hands the piece over, and nobody waits for it.
        let piece = pieces[number].lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(piece) = piece {
            work(number, piece);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_piece_is_worked_on_once() {
        for count in [1, 3] {
            let mut values = vec![0u32; 10 * 7 + 3];
            for_each(&Threads::new(count), values.chunks_mut(7), |number, piece| {
                piece.iter_mut().for_each(|value| *value += 1 + number as u32);
            });
            assert!(values.iter().enumerate().all(|(i, &value)| value == 1 + i as u32 / 7));
        }
    }
}
