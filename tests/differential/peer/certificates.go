package main

import (
	"crypto/x509"
	"time"

	"k8s.io/apimachinery/pkg/apis/asn1"
)

// Whom a certificate names; OK is false where it is refused.
type name struct {
	OK            bool     `json:"ok"`
	CommonName    string   `json:"common_name"`
	Organizations []string `json:"organizations"`
	UIDs          []string `json:"uids"`
	Error         string   `json:"error"`
}

func subject(request question) any {
	certificate, err := x509.ParseCertificate(request.Data)
	if err != nil {
		return name{Error: err.Error()}
	}
	read := certificate.Subject
	found := name{OK: true, CommonName: read.CommonName, Organizations: read.Organization}
	for _, attribute := range read.Names {
		if text, isText := attribute.Value.(string); isText && attribute.Type.Equal(asn1.X509UID()) {
			found.UIDs = append(found.UIDs, text)
		}
	}
	return found
}

// Whether a chain counts.
type verdict struct {
	OK    bool   `json:"ok"`
	Error string `json:"error"`
	// Some authority was left out, because it does not parse.
	LeftOut bool `json:"left_out"`
}

// As the API server's authenticator verifies clients (apiserver:
// pkg/authentication/request/x509). Go's TLS library ends the handshake when any certificate that
// a client shows does not parse; here only the client's own one has to: the others count for
// nothing then.
func chain(request question) any {
	options := x509.VerifyOptions{
		Roots:         x509.NewCertPool(),
		Intermediates: x509.NewCertPool(),
		CurrentTime:   time.Unix(request.Time, 0),
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	var found verdict
	for _, der := range request.Roots {
		// One that does not parse spoils no other here, for it does not with coracle.
		if root, err := x509.ParseCertificate(der); err == nil {
			options.Roots.AddCert(root)
		} else {
			found.LeftOut = true
		}
	}
	var own *x509.Certificate
	for index, der := range request.Chain {
		certificate, err := x509.ParseCertificate(der)
		switch {
		case err == nil && index == 0:
			own = certificate
		case err == nil:
			options.Intermediates.AddCert(certificate)
		case index == 0:
			found.Error = err.Error()
			return found
		}
	}
	if _, err := own.Verify(options); err != nil {
		found.Error = err.Error()
	} else {
		found.OK = true
	}
	return found
}
