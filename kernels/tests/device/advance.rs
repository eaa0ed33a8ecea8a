//! The end of a step: tokens, positions and histories move on, and every step's ids appear in the ring.

use ironloom_kernels::{Advance, Report, advance};

use crate::{buffer, gpu, read_i32, read_u32, upload_i32, upload_u32, upload_u64};

#[test]
fn steps_move_on_and_are_reported() {
    let Some(gpu) = gpu() else { return };
    for rows in [1usize, 5, 64, 100] {
        let (ring_length, steps) = (4, 6);
        let start: Vec<i32> = (0..rows as i32).map(|row| if row % 3 == 2 { -1 } else { row }).collect();
        let capacity = rows + steps + 1;
        let histories: Vec<_> = (0..rows).map(|_| buffer(&gpu, capacity * 4)).collect();
        let table: Vec<u64> =
            histories.iter().enumerate().map(|(row, h)| if row % 4 == 3 { 0 } else { h.slice().address() }).collect();
        let (positions, table) = (upload_i32(&gpu, &start), upload_u64(&gpu, &table));
        let tokens = upload_u32(&gpu, &vec![77; rows]);
        let (step, published) = (upload_u64(&gpu, &[0]), upload_u64(&gpu, &[0]));
        // Memory of the device in place of mapped memory of the host: the same addresses to the kernel.
        let ring = buffer(&gpu, ring_length * rows * 4);
        let id_of = |step: usize, row: usize| if row == 1 && step == 3 { u32::MAX } else { (1000 * step + row) as u32 };
        for number in 0..steps {
            let ids: Vec<u32> = (0..rows).map(|row| id_of(number, row)).collect();
            let ids = upload_u32(&gpu, &ids);
            let report = Report { ring: ring.slice().address(), ring_length, published: published.slice().address() };
            let call = Advance {
                ids: ids.slice(),
                tokens: tokens.slice(),
                positions: positions.slice(),
                histories: Some(table.slice()),
                step: step.slice(),
                report,
                rows,
            };
            advance(&gpu, &call).unwrap();
            assert_eq!(read_u32(&gpu, &published, 2), [number as u32 + 1, 0]);
            assert_eq!(read_u32(&gpu, &step, 2), [number as u32 + 1, 0]);
            let (tokens, positions) = (read_u32(&gpu, &tokens, rows), read_i32(&gpu, &positions, rows));
            let ring = read_u32(&gpu, &ring, ring_length * rows);
            for row in 0..rows {
                let id = id_of(number, row);
                assert_eq!(ring[number % ring_length * rows + row], id);
                let active = start[row] >= 0;
                assert_eq!(positions[row], if active { start[row] + number as i32 + 1 } else { -1 });
                assert_eq!(
                    tokens[row],
                    if !active {
                        77
                    } else if id == u32::MAX {
                        0
                    } else {
                        id
                    }
                );
            }
            assert!(advance(&gpu, &Advance { rows: rows + 1, ..call }).is_err());
            assert!(advance(&gpu, &Advance { report: Report { ring_length: 0, ..report }, ..call }).is_err());
            assert!(advance(&gpu, &Advance { report: Report { published: 0, ..report }, ..call }).is_err());
        }
        for (row, history) in histories.iter().enumerate() {
            let ids = read_u32(&gpu, history, capacity);
            let Ok(first) = usize::try_from(start[row]) else {
                assert!(ids.iter().all(|&id| id == u32::MAX), "a row that is not in use writes nothing");
                continue;
            };
            if row % 4 == 3 {
                continue;
            }
            for number in 0..steps {
                let id = id_of(number, row);
                assert_eq!(ids[first + 1 + number], if id == u32::MAX { 0 } else { id });
            }
            assert!(ids[..=first].iter().chain(&ids[first + 1 + steps..]).all(|&id| id == u32::MAX));
        }
    }
}
