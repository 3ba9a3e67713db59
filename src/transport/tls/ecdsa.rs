//! Verifies ECDSA signatures that the cryptographic library does not (FIPS 186-5, SEC 1): the curve
//! P-521, and SHA-512 with P-256 and P-384.
//!
//! Only public values are used: keys, digests and signatures. So the time may depend on them, and
//! nothing is signed here. All curves have the same code, with numbers of nine words.

use std::fmt;
use std::sync::LazyLock;

use rustls::SignatureScheme;
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{AlgorithmIdentifier, InvalidSignature, SignatureVerificationAlgorithm, alg_id};

use crate::util::sha256::{self, Sha2};
use crate::util::x509::{Reader, tag};

/// The algorithms of the library, and those of this file.
pub(super) fn all() -> WebPkiSupportedAlgorithms {
    static ALL: LazyLock<WebPkiSupportedAlgorithms> = LazyLock::new(|| {
        let library = rustls::crypto::ring::default_provider().signature_verification_algorithms;
        let mut all = library.all.to_vec();
        let own: [&'static dyn SignatureVerificationAlgorithm; 5] =
            [P521_SHA512, P521_SHA384, P521_SHA256, P384_SHA512, P256_SHA512];
        all.extend(own);
        // TLS 1.3 uses the first algorithm of a scheme only; in TLS 1.2 a scheme does not name the curve.
        let mut mapping = library.mapping.to_vec();
        for (scheme, algorithms) in &mut mapping {
            let own: &dyn SignatureVerificationAlgorithm = match scheme {
                SignatureScheme::ECDSA_NISTP384_SHA384 => P521_SHA384,
                SignatureScheme::ECDSA_NISTP256_SHA256 => P521_SHA256,
                _ => continue,
            };
            *algorithms = [algorithms, &[own][..]].concat().leak();
        }
        let with_sha512: &[&dyn SignatureVerificationAlgorithm] = &[P521_SHA512, P384_SHA512, P256_SHA512];
        mapping.push((SignatureScheme::ECDSA_NISTP521_SHA512, with_sha512));
        // Made once.
        WebPkiSupportedAlgorithms { all: all.leak(), mapping: mapping.leak() }
    });
    *ALL
}

const P521_SHA512: &Algorithm = &Algorithm(&P521, Sha2::Sha512, alg_id::ECDSA_P521, alg_id::ECDSA_SHA512);
const P521_SHA384: &Algorithm = &Algorithm(&P521, Sha2::Sha384, alg_id::ECDSA_P521, alg_id::ECDSA_SHA384);
const P521_SHA256: &Algorithm = &Algorithm(&P521, Sha2::Sha256, alg_id::ECDSA_P521, alg_id::ECDSA_SHA256);
const P384_SHA512: &Algorithm = &Algorithm(&P384, Sha2::Sha512, alg_id::ECDSA_P384, alg_id::ECDSA_SHA512);
const P256_SHA512: &Algorithm = &Algorithm(&P256, Sha2::Sha512, alg_id::ECDSA_P256, alg_id::ECDSA_SHA512);

/// A curve with a digest, and the identifiers of keys and of signatures.
struct Algorithm(&'static LazyLock<Curve>, Sha2, AlgorithmIdentifier, AlgorithmIdentifier);

impl fmt::Debug for Algorithm {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Ecdsa({:?}, {:?})", self.2, self.1)
    }
}

impl SignatureVerificationAlgorithm for Algorithm {
    fn verify_signature(&self, key: &[u8], message: &[u8], signature: &[u8]) -> Result<(), InvalidSignature> {
        let digest = sha256::digest_of(self.1, message);
        if self.0.verify(key, &digest, signature) == Some(true) { Ok(()) } else { Err(InvalidSignature) }
    }

    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        self.2
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        self.3
    }
}

/// The words of a number, the lowest first: 576 bits.
const WORDS: usize = 9;
const BITS: usize = WORDS * 64;

/// A number below a modulus.
type Number = [u64; WORDS];

const ZERO: Number = [0; WORDS];
const PLAIN_ONE: Number = [1, 0, 0, 0, 0, 0, 0, 0, 0];

/// A number from at most 72 bytes, the highest first.
fn number(bytes: &[u8]) -> Option<Number> {
    let mut number = ZERO;
    let mut words = number.iter_mut();
    for chunk in bytes.rchunks(8) {
        *words.next()? = chunk.iter().fold(0, |word, byte| (word << 8) | u64::from(*byte));
    }
    Some(number)
}

fn is_below(left: &Number, right: &Number) -> bool {
    left.iter().rev().lt(right.iter().rev())
}

/// The sum, and what does not fit.
fn sum(left: &Number, right: &Number) -> (Number, bool) {
    let mut carry = false;
    let mut all = ZERO;
    for (to, (a, b)) in all.iter_mut().zip(left.iter().zip(right)) {
        let (part, first) = a.overflowing_add(*b);
        let (part, second) = part.overflowing_add(u64::from(carry));
        (*to, carry) = (part, first || second);
    }
    (all, carry)
}

/// The difference modulo 2⁵⁷⁶.
fn difference(left: &Number, right: &Number) -> Number {
    let mut borrow = false;
    let mut all = ZERO;
    for (to, (a, b)) in all.iter_mut().zip(left.iter().zip(right)) {
        let (part, first) = a.overflowing_sub(*b);
        let (part, second) = part.overflowing_sub(u64::from(borrow));
        (*to, borrow) = (part, first || second);
    }
    all
}

fn bit(number: &Number, index: usize) -> bool {
    number.get(index / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
}

/// An odd prime below 2⁵⁷⁵. Numbers are multiplied in Montgomery's form: times 2⁵⁷⁶.
struct Modulus {
    prime: Number,
    /// The negative inverse of the lowest word, modulo 2⁶⁴.
    inverse: u64,
    /// 2⁵⁷⁶ and its square.
    unit: Number,
    square: Number,
}

impl Modulus {
    fn new(prime: Number) -> Modulus {
        let lowest = prime.first().copied().unwrap_or(1);
        // Newton's method: each step doubles the number of right bits.
        let inverse = (0..6)
            .fold(1_u64, |inverse, _| inverse.wrapping_mul(2_u64.wrapping_sub(lowest.wrapping_mul(inverse))));
        let mut modulus = Modulus { prime, inverse: inverse.wrapping_neg(), unit: ZERO, square: ZERO };
        let doubled = |times: usize| (0..times).fold(PLAIN_ONE, |number, _| modulus.add(&number, &number));
        let (unit, square) = (doubled(BITS), doubled(2 * BITS));
        (modulus.unit, modulus.square) = (unit, square);
        modulus
    }

    fn add(&self, left: &Number, right: &Number) -> Number {
        let (all, _) = sum(left, right);
        if is_below(&all, &self.prime) { all } else { difference(&all, &self.prime) }
    }

    fn subtract(&self, left: &Number, right: &Number) -> Number {
        let all = difference(left, right);
        if is_below(left, right) { sum(&all, &self.prime).0 } else { all }
    }

    /// The product divided by 2⁵⁷⁶.
    fn multiply(&self, left: &Number, right: &Number) -> Number {
        let mut all = ZERO;
        for a in left {
            // Two carries: of the product and of the multiple of the prime that makes the lowest word zero.
            let first = u128::from(*a) * u128::from(right[0]) + u128::from(all[0]);
            let factor = u128::from((first as u64).wrapping_mul(self.inverse));
            let zero = factor * u128::from(self.prime[0]) + u128::from(first as u64);
            let (mut high, mut higher) = (first >> 64, zero >> 64);
            for index in 1..WORDS {
                let part = u128::from(*a) * u128::from(right[index]) + u128::from(all[index]) + high;
                high = part >> 64;
                let part = factor * u128::from(self.prime[index]) + u128::from(part as u64) + higher;
                higher = part >> 64;
                all[index - 1] = part as u64;
            }
            // Both numbers are below 2⁵⁷⁵: nothing is lost.
            all[WORDS - 1] = (high + higher) as u64;
        }
        if is_below(&all, &self.prime) { all } else { difference(&all, &self.prime) }
    }

    fn to_form(&self, number: &Number) -> Number {
        self.multiply(number, &self.square)
    }

    fn of_form(&self, number: &Number) -> Number {
        self.multiply(number, &PLAIN_ONE)
    }

    /// The inverse, by Fermat's theorem; of zero it is zero.
    fn invert(&self, number: &Number) -> Number {
        let exponent = difference(&self.prime, &[2, 0, 0, 0, 0, 0, 0, 0, 0]);
        let mut power = self.unit;
        for index in (0..BITS).rev() {
            power = self.multiply(&power, &power);
            if bit(&exponent, index) {
                power = self.multiply(&power, number);
            }
        }
        power
    }
}

/// A point with the coordinates x / z² and y / z³, in Montgomery's form; for z = 0 it is the neutral
/// element.
#[derive(Debug, Clone, Copy)]
struct Point {
    x: Number,
    y: Number,
    z: Number,
}

/// A curve y² = x³ - 3x + b with a prime number of points.
struct Curve {
    field: Modulus,
    order: Modulus,
    /// In Montgomery's form.
    b: Number,
    generator: Point,
    /// Bytes of a coordinate.
    length: usize,
}

static P256: LazyLock<Curve> = LazyLock::new(|| {
    Curve::new(
        32,
        "ffffffff00000001000000000000000000000000ffffffffffffffffffffffff",
        "ffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551",
        "5ac635d8aa3a93e7b3ebbd55769886bc651d06b0cc53b0f63bce3c3e27d2604b",
        "6b17d1f2e12c4247f8bce6e563a440f277037d812deb33a0f4a13945d898c296",
        "4fe342e2fe1a7f9b8ee7eb4a7c0f9e162bce33576b315ececbb6406837bf51f5",
    )
});
static P384: LazyLock<Curve> = LazyLock::new(|| {
    Curve::new(
        48,
        "fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffeffffffff0000000000000000ffffffff",
        "ffffffffffffffffffffffffffffffffffffffffffffffffc7634d81f4372ddf581a0db248b0a77aecec196accc52973",
        "b3312fa7e23ee7e4988e056be3f82d19181d9c6efe8141120314088f5013875ac656398d8a2ed19d2a85c8edd3ec2aef",
        "aa87ca22be8b05378eb1c71ef320ad746e1d3b628ba79b9859f741e082542a385502f25dbf55296c3a545e3872760ab7",
        "3617de4a96262c6f5d9e98bf9292dc29f8f41dbd289a147ce9da3113b5f0b8c00a60b1ce1d7e819d7a431d7c90ea0e5f",
    )
});
static P521: LazyLock<Curve> = LazyLock::new(|| {
    Curve::new(
        66,
        "01ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\
         ffffffffffffffffffffffffffffffffffff",
        "01fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffa51868783bf2f966b7fcc0148f709\
         a5d03bb5c9b8899c47aebb6fb71e91386409",
        "0051953eb9618e1c9a1f929a21a0b68540eea2da725b99b315f3b8b489918ef109e156193951ec7e937b1652c0bd3bb1\
         bf073573df883d2c34f1ef451fd46b503f00",
        "00c6858e06b70404e9cd9e3ecb662395b4429c648139053fb521f828af606b4d3dbaa14b5e77efe75928fe1dc127a2ff\
         a8de3348b3c1856a429bf97e7e31c2e5bd66",
        "011839296a789a3bc0045c8a5fb42c7d1bd998f54449579b446817afbd17273e662c97ee72995ef42640c550b9013fad\
         0761353c7086a272c24088be94769fd16650",
    )
});

impl Curve {
    fn new(length: usize, field: &str, order: &str, b: &str, x: &str, y: &str) -> Curve {
        let parse = |digits: &str| {
            digits.bytes().fold(ZERO, |number, digit| {
                let digit = char::from(digit).to_digit(16).map_or(0, u64::from);
                let mut carry = digit;
                number.map(|word| {
                    let next = (word << 4) | carry;
                    carry = word >> 60;
                    next
                })
            })
        };
        let (field, order) = (Modulus::new(parse(field)), Modulus::new(parse(order)));
        let form = |digits: &str| field.to_form(&parse(digits));
        let generator = Point { x: form(x), y: form(y), z: field.unit };
        Curve { b: form(b), generator, field, order, length }
    }

    /// Whether the signature (DER) of a digest was made by the key (an uncompressed point). `None`:
    /// one of them is malformed.
    fn verify(&self, key: &[u8], digest: &[u8], signature: &[u8]) -> Option<bool> {
        let key = self.point(key)?;
        let mut parts = Reader(Reader(signature).only(tag::SEQUENCE)?);
        let r = self.scalar(parts.take(tag::INTEGER)?)?;
        let s = self.scalar(parts.take(tag::INTEGER)?)?;
        parts.0.is_empty().then_some(())?;
        // The leftmost bits of the digest, as many as the order has; whole bytes for these curves.
        let digest = number(digest.get(..digest.len().min(self.length))?)?;
        let order = &self.order;
        let inverse = order.invert(&order.to_form(&s));
        // One factor in Montgomery's form: the product is in the usual form.
        let by_generator = order.multiply(&self.below_order(digest), &inverse);
        let by_key = order.multiply(&r, &inverse);
        let sum = self.combine(&by_generator, &key, &by_key);
        if sum.z == ZERO {
            return Some(false);
        }
        let field = &self.field;
        let inverse = field.invert(&sum.z);
        let x = field.multiply(&sum.x, &field.multiply(&inverse, &inverse));
        Some(self.below_order(field.of_form(&x)) == r)
    }

    /// A number below twice the order, modulo the order.
    fn below_order(&self, number: Number) -> Number {
        if is_below(&number, &self.order.prime) { number } else { difference(&number, &self.order.prime) }
    }

    /// A number of a signature: the content of an INTEGER, in its shortest form, from one to the
    /// order.
    fn scalar(&self, content: &[u8]) -> Option<Number> {
        let bytes = match content {
            [] | [0x80..=0xff, ..] | [0] | [0, 0..=0x7f, ..] => return None,
            [0, rest @ ..] | rest => rest,
        };
        let scalar = number(bytes)?;
        is_below(&scalar, &self.order.prime).then_some(scalar)
    }

    /// A point of the curve, which is not the neutral element.
    fn point(&self, key: &[u8]) -> Option<Point> {
        let (4, coordinates) = key.split_first()? else { return None };
        let (x, y) = coordinates.split_at_checked(self.length).filter(|(_, y)| y.len() == self.length)?;
        let field = &self.field;
        let coordinate = |bytes| {
            let value = number(bytes).filter(|value| is_below(value, &field.prime))?;
            Some(field.to_form(&value))
        };
        let (x, y) = (coordinate(x)?, coordinate(y)?);
        let cube = field.multiply(&field.multiply(&x, &x), &x);
        let thrice = field.add(&field.add(&x, &x), &x);
        let right = field.add(&field.subtract(&cube, &thrice), &self.b);
        (field.multiply(&y, &y) == right).then_some(Point { x, y, z: field.unit })
    }

    /// The sum of both multiples.
    fn combine(&self, by_generator: &Number, key: &Point, by_key: &Number) -> Point {
        let both = self.add(&self.generator, key);
        let mut all = Point { x: self.field.unit, y: self.field.unit, z: ZERO };
        for index in (0..BITS).rev() {
            all = self.double(&all);
            all = match (bit(by_generator, index), bit(by_key, index)) {
                (false, false) => continue,
                (true, false) => self.add(&all, &self.generator),
                (false, true) => self.add(&all, key),
                (true, true) => self.add(&all, &both),
            };
        }
        all
    }

    /// The double, with the formulas for Jacobian coordinates and a = -3. No point of these curves
    /// has y = 0: their number is odd.
    fn double(&self, point: &Point) -> Point {
        let f = &self.field;
        let twice = |number: &Number| f.add(number, number);
        let delta = f.multiply(&point.z, &point.z);
        let gamma = f.multiply(&point.y, &point.y);
        let beta = f.multiply(&point.x, &gamma);
        let product = f.multiply(&f.subtract(&point.x, &delta), &f.add(&point.x, &delta));
        let alpha = f.add(&twice(&product), &product);
        let beta_4 = twice(&twice(&beta));
        let x = f.subtract(&f.multiply(&alpha, &alpha), &twice(&beta_4));
        let z = twice(&f.multiply(&point.y, &point.z));
        let gamma_8 = twice(&twice(&twice(&f.multiply(&gamma, &gamma))));
        let y = f.subtract(&f.multiply(&alpha, &f.subtract(&beta_4, &x)), &gamma_8);
        Point { x, y, z }
    }

    fn add(&self, left: &Point, right: &Point) -> Point {
        if left.z == ZERO {
            return *right;
        }
        if right.z == ZERO {
            return *left;
        }
        let f = &self.field;
        let (square_1, square_2) = (f.multiply(&left.z, &left.z), f.multiply(&right.z, &right.z));
        let (u_1, u_2) = (f.multiply(&left.x, &square_2), f.multiply(&right.x, &square_1));
        let s_1 = f.multiply(&left.y, &f.multiply(&right.z, &square_2));
        let s_2 = f.multiply(&right.y, &f.multiply(&left.z, &square_1));
        let (h, r) = (f.subtract(&u_2, &u_1), f.subtract(&s_2, &s_1));
        if h == ZERO {
            // The same point, or its negative.
            return match r == ZERO {
                true => self.double(left),
                false => Point { x: f.unit, y: f.unit, z: ZERO },
            };
        }
        let square = f.multiply(&h, &h);
        let cube = f.multiply(&h, &square);
        let v = f.multiply(&u_1, &square);
        let x = f.subtract(&f.subtract(&f.multiply(&r, &r), &cube), &f.add(&v, &v));
        let y = f.subtract(&f.multiply(&r, &f.subtract(&v, &x)), &f.multiply(&s_1, &cube));
        let z = f.multiply(&f.multiply(&left.z, &right.z), &h);
        Point { x, y, z }
    }
}

#[cfg(test)]
#[path = "ecdsa_tests.rs"]
mod tests;
