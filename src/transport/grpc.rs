/// tmp
pub struct Unary<Req, Resp> { pub name: &'static str, pub method: grpcio::Method<Req, Resp> }
/// tmp
pub struct Stream<Req, Resp> { pub name: &'static str, pub method: grpcio::Method<Req, Resp> }
