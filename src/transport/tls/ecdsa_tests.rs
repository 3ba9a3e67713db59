use super::*;

fn bytes(digits: &str) -> Vec<u8> {
    (0..digits.len())
        .step_by(2)
        .map(|offset| u8::from_str_radix(&digits[offset..offset + 2], 16).unwrap())
        .collect()
}

fn curve(name: &str) -> &'static Curve {
    match name {
        "p256" => &P256,
        "p384" => &P384,
        _ => &P521,
    }
}

/// The lines have curve, key, digest, signature and result. OpenSSL made the signatures; the last
/// twelve of each curve have keys and digests for which equal and opposite points are added.
const SIGNATURES: &str = include_str!("testdata/ecdsa.txt");

#[test]
fn signatures_of_another_program_are_verified() {
    let mut count = 0;
    for line in SIGNATURES.lines() {
        let [name, key, digest, signature, result] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let outcome = curve(name).verify(&bytes(key), &bytes(digest), &bytes(signature));
        assert_eq!(outcome, Some(result == "valid"), "{line}");
        count += 1;
    }
    assert!(count > 60);
}

#[test]
fn malformed_keys_and_signatures_are_refused() {
    for line in SIGNATURES.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let (curve, key) = (curve(fields[0]), bytes(fields[1]));
        let (digest, signature) = (bytes(fields[2]), bytes(fields[3]));
        let mut off_curve = key.clone();
        *off_curve.last_mut().unwrap() ^= 1;
        for bad in [&[][..], &[0], &[4], &key[1..], &key[..key.len() - 1], &off_curve, &[2; 67]] {
            assert_eq!(curve.verify(bad, &digest, &signature), None);
        }
        // Coordinates of the prime and more.
        let large = [&[4][..], &vec![0xff; 2 * curve.length]].concat();
        assert_eq!(curve.verify(&large, &digest, &signature), None);
        for bad in [&signature[..signature.len() - 1], &[&signature[..], &[0]].concat(), &[], &[0x30, 0]] {
            assert_eq!(curve.verify(&key, &digest, bad), None);
        }
    }
}

#[test]
fn numbers_of_a_signature_are_between_zero_and_the_order() {
    for curve in [&*P256, &*P384, &*P521] {
        let content = |number: &Number| {
            let all: Vec<u8> = number.iter().rev().flat_map(|word| word.to_be_bytes()).collect();
            let first = all.iter().position(|byte| *byte != 0).unwrap_or(all.len() - 1);
            let number = all[first..].to_vec();
            if number[0] >= 0x80 { [vec![0], number].concat() } else { number }
        };
        let order = curve.order.prime;
        assert_eq!(curve.scalar(&content(&order)), None);
        assert_eq!(curve.scalar(&content(&sum(&order, &PLAIN_ONE).0)), None);
        let last = difference(&order, &PLAIN_ONE);
        assert_eq!(curve.scalar(&content(&last)), Some(last));
        assert_eq!(curve.scalar(&[1]), Some(PLAIN_ONE));
        for bad in [&[][..], &[0], &[0x80], &[0, 1], &[0xff; 66], &[1; 80]] {
            assert_eq!(curve.scalar(bad), None, "{bad:?}");
        }
    }
}

#[test]
fn multiples_of_the_generator_are_consistent() {
    for curve in [&*P256, &*P384, &*P521] {
        let generator = curve.generator;
        let normal = |point: Point| {
            let f = &curve.field;
            let inverse = f.invert(&point.z);
            let square = f.multiply(&inverse, &inverse);
            (f.multiply(&point.x, &square), f.multiply(&point.y, &f.multiply(&square, &inverse)))
        };
        // The order times the generator is the neutral element, with any split in two summands.
        let last = difference(&curve.order.prime, &PLAIN_ONE);
        assert_eq!(curve.combine(&curve.order.prime, &generator, &ZERO).z, ZERO);
        assert_eq!(curve.combine(&last, &generator, &PLAIN_ONE).z, ZERO);
        let half = curve.combine(&[5, 7, 0, 1, 0, 0, 0, 0, 0], &generator, &[9, 0, 3, 0, 0, 0, 0, 0, 0]);
        let whole = curve.combine(&[14, 7, 3, 1, 0, 0, 0, 0, 0], &generator, &ZERO);
        assert_eq!(normal(half), normal(whole));
        let (x, y) = normal(curve.combine(&last, &generator, &ZERO));
        assert_eq!((x, curve.field.subtract(&ZERO, &y)), normal(generator));
    }
}
